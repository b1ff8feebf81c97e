// For x86 processors with AVX2 and FMA: compiled with -mavx2 -mfma.
#define EAGLE3_VERSION avx2
#include "attention_rows.h"
