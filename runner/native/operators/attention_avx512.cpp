// For x86 processors with AVX-512: compiled with -mavx512f, -mavx512dq, -mavx512bw and -mavx512vl.
#define EAGLE3_VERSION avx512
#define EAGLE3_LANES 16
#include "attention_rows.h"
