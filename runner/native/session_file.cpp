#include "session_file.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>

#include "record.h"
#include "sha256.h"
#include "state.h"

namespace eagle3 {
namespace {

struct Head {
  char magic[8];
  uint8_t artifact[32];
  int64_t tokens;
  Counters counters;
  int64_t note_bytes, state_bytes, reserved;
};
static_assert(sizeof(Head) == 104, "the head has no padding");
constexpr char kMagic[] = "eagle3s\x01";
constexpr int64_t kDigest = sizeof(Digest);
constexpr size_t kChunk = 1 << 20, kDigits = 12;

struct Close {
  void operator()(FILE* file) const { fclose(file); }
};
using File = std::unique_ptr<FILE, Close>;

[[noreturn]] void refuse_system(const std::string& path) { throw Refused(path + ": " + std::strerror(errno)); }

/// A new file that becomes `path` when it is complete. Its owner alone may read and write it.
class NewFile {
 public:
  explicit NewFile(const std::string& path) : path_(path) {
    const std::filesystem::path whole(path);
    beside_ = (whole.parent_path() / ("." + whole.filename().string() + ".XXXXXX")).string();
    const int descriptor = mkstemp(beside_.data());  // with the permissions 600
    if (descriptor < 0) refuse_system(path);
    file_.reset(fdopen(descriptor, "wb"));
  }
  ~NewFile() {
    if (!beside_.empty()) std::remove(beside_.c_str());
  }
  void write(const void* data, size_t size) {
    if (size && fwrite(data, 1, size, file_.get()) != size) refuse_system(path_);
    hash_.add(data, size);
  }
  /// Appends the sha256 and moves the file to its place. Returns its size.
  int64_t finish() {
    const Digest digest = hash_.digest();
    if (fwrite(digest.data(), 1, digest.size(), file_.get()) != digest.size()) refuse_system(path_);
    const int64_t size = ftello(file_.get());
    if (fflush(file_.get()) || fsync(fileno(file_.get()))) refuse_system(path_);
    if (std::rename(beside_.c_str(), path_.c_str())) refuse_system(path_);
    beside_.clear();
    return size;
  }

 private:
  std::string path_, beside_;
  File file_;
  Sha256 hash_;
};

void check_can_save(const Metadata& metadata) {
  if (metadata.state_groups.empty()) {
    throw Refused("the artifact has no method read_state, which keeps a conversation: export it again for cuda "
        "or xnnpack, without --no-sessions");
  }
}

void read(FILE* file, void* data, size_t size, const std::string& path) {
  if (size && fread(data, 1, size, file) != size) throw Refused(path + " was cut while it was read: delete it");
}

/// The beginning of a file of `size` bytes with a conversation of this artifact, whose numbers are possible.
Head read_head(FILE* file, int64_t size, const std::string& path, const std::string& artifact, const Metadata& metadata) {
  Head head;
  if (fread(&head, 1, sizeof head, file) != sizeof head || std::memcmp(head.magic, kMagic, sizeof head.magic)) {
    throw Refused(path + " is no conversation that eagle3 saved, or is damaged: give another file, or delete it");
  }
  Digest of;
  std::memcpy(of.data(), head.artifact, of.size());
  if (hexadecimal(of) != artifact) {
    throw Refused(path + " belongs to another artifact (sha256 " + hexadecimal(of).substr(0, kDigits) +
        "..., this one has " + artifact.substr(0, kDigits) + "...): open it with that one, or give another file");
  }
  const Counters& c = head.counters;
  const int64_t longest = metadata.max_seq_len;
  const bool counts = std::min({head.tokens, c.draft_slots, c.slots, c.committed, c.saved, head.note_bytes,
                          head.state_bytes}) >= 0 && head.reserved == 0 && head.tokens <= c.slots + 1 &&
      c.slots + 1 <= 2 * longest && head.tokens <= longest && c.draft_slots <= std::max<int64_t>(0, head.tokens - 1);
  const int64_t left = size - (int64_t)sizeof head - kDigest;
  if (!counts || head.note_bytes > left || head.state_bytes > left ||
      8 * head.tokens + head.note_bytes + head.state_bytes != left) {
    throw Refused(path + " is damaged or cut (" + grouped(size) + " bytes): delete it, or give another file");
  }
  return head;
}

void check_digest(FILE* file, int64_t size, const std::string& path) {
  rewind(file);
  Sha256 hash;
  std::vector<uint8_t> part(kChunk);
  for (int64_t left = size - kDigest; left;) {
    const size_t next = std::min<int64_t>(left, part.size());
    read(file, part.data(), next, path);
    hash.add(part.data(), next);
    left -= next;
  }
  Digest recorded;
  read(file, recorded.data(), recorded.size(), path);
  if (recorded != hash.digest()) {
    throw Refused(path + " is damaged (its sha256 differs): delete it, or give another file");
  }
}

}  // namespace

Saved save_session(
    const std::string& path, Session& session, const CachedTokens& cached, const std::string& artifact,
    const std::string& note) {
  check_can_save(session.metadata);
  const int64_t tokens = cached.tokens.size(), slots = cached.counters().slots;
  Head head{};
  std::memcpy(head.magic, kMagic, sizeof head.magic);
  for (size_t i = 0; i < sizeof head.artifact; i++) {
    head.artifact[i] = std::strtol(artifact.substr(2 * i, 2).c_str(), nullptr, 16);
  }
  head.tokens = tokens;
  head.counters = cached.counters();
  head.note_bytes = note.size();
  head.state_bytes = tokens ? state_bytes(session, slots) : 0;
  NewFile file(path);
  file.write(&head, sizeof head);
  file.write(cached.tokens.data(), 8 * tokens);
  file.write(note.data(), note.size());
  if (tokens) read_pieces(session, slots, [&](uint8_t* data, size_t size) { file.write(data, size); });
  return {tokens, file.finish(), note};
}

Saved resume_session(const std::string& path, Session& session, CachedTokens& cached, const std::string& artifact) {
  check_can_save(session.metadata);
  File file(fopen(path.c_str(), "rb"));
  struct stat found;
  if (!file || fstat(fileno(file.get()), &found)) refuse_system(path);
  const int64_t size = found.st_size;
  const Head head = read_head(file.get(), size, path, artifact, session.metadata);
  Ids tokens(head.tokens);
  read(file.get(), tokens.data(), 8 * tokens.size(), path);
  std::string note(head.note_bytes, 0);
  read(file.get(), note.data(), note.size(), path);
  for (int64_t token : tokens) {
    if (token < 0 || token >= session.metadata.vocab_size) {
      throw Refused(path + " is damaged (a token is outside the vocabulary): delete it, or give another file");
    }
  }
  if (head.tokens && state_bytes(session, head.counters.slots) != head.state_bytes) {
    throw Refused(path + " is damaged (its state has " + grouped(head.state_bytes) + " bytes): delete it");
  }
  check_digest(file.get(), size, path);
  fseeko(file.get(), size - kDigest - head.state_bytes, SEEK_SET);
  cached.clear();
  if (head.tokens) {
    write_pieces(session, head.counters.slots, [&](uint8_t* data, size_t count) { read(file.get(), data, count, path); });
  }
  cached.restore(tokens, head.counters);
  return {head.tokens, size, note};
}

}  // namespace eagle3
