// Device memory: a range of addresses that nobody can touch. Copies and kernels reach the same memory at other addresses,
// through the driver alone, which knows every allocation to the byte.

#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <string>

namespace stand_in {

struct Block {
  uint64_t begin, size;
  bool live;  // in the order of the streams: a kernel that is queued before the free still finds it
  bool held;  // the host has not given it back yet
  int64_t graph;  // whose capture allocated it, 0: none
  std::string label;

  uint64_t end() const { return begin + size; }
};

class Memory {
 public:
  static constexpr uint64_t RANGE = 1ull << 37, ALIGNMENT = 512, MOST_POISONED = 256ull << 20, MOST_DEAD = 1 << 15;

  Memory() {
    file_ = memfd_create("device memory", MFD_CLOEXEC);
    auto flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    auto at = mmap(nullptr, RANGE, PROT_NONE, flags, -1, 0);
    auto shown = ftruncate(file_, RANGE)
        ? MAP_FAILED
        : mmap(nullptr, RANGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file_, 0);
    if (at == MAP_FAILED || shown == MAP_FAILED) {
      perror("the stand-in's device memory");
      _exit(1);
    }
    start_ = reinterpret_cast<uint64_t>(at);
    shown_ = static_cast<char*>(shown);
  }

  bool holds(uint64_t address) const { return address - start_ < RANGE; }
  char* shown(uint64_t address) const { return shown_ + (address - start_); }
  uint64_t used() const { return used_; }

  // A block that is not live yet: its stream makes it so. Addresses are not used again, what is freed stays known.
  Block* reserve(uint64_t size, int64_t graph) {
    uint64_t taken = (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT + ALIGNMENT;  // with a gap behind it
    if (next_ + taken > RANGE) return nullptr;
    Block block{start_ + next_, size, false, true, graph, ""};
    next_ += taken;
    used_ += size;
    return &(blocks_[block.begin] = block);
  }

  void start(Block& block) {
    block.live = true;
    auto data = shown(block.begin);
    if (block.size <= MOST_POISONED) {
      memset(data, 0xff, block.size);
    } else {  // of more, the ends: the rest would be this machine's memory
      memset(data, 0xff, MOST_POISONED / 16);
      memset(data + block.size - MOST_POISONED / 16, 0xff, MOST_POISONED / 16);
    }
  }

  void stop(Block& block) {
    block.live = false;
    auto page = 4096ull, first = (block.begin - start_ + page - 1) / page * page, last = (block.end() - start_) / page * page;
    if (first < last) fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, first, last - first);
  }

  // For good: of a graph's block, once the graph is gone too.
  void forget(Block& block) {
    if (block.live) stop(block);
    used_ -= block.size;
    dead_.push_back(block.begin);
    if (dead_.size() > MOST_DEAD) {
      blocks_.erase(dead_.front());
      dead_.pop_front();
    }
  }

  Block* find(uint64_t address) {
    auto next = blocks_.upper_bound(address);
    if (next == blocks_.begin()) return nullptr;
    auto& block = std::prev(next)->second;
    return address < block.end() || address == block.begin ? &block : nullptr;
  }

  // The block before an address, live or not, which may end before it.
  Block* before(uint64_t address) {
    auto next = blocks_.upper_bound(address);
    return next == blocks_.begin() ? nullptr : &std::prev(next)->second;
  }

  bool is_live(uint64_t address, uint64_t size) {
    auto block = find(address);
    return block && block->live && address + size <= block->end();
  }

  uint64_t held() const {
    return std::count_if(blocks_.begin(), blocks_.end(), [](auto& each) { return each.second.held; });
  }

  template <typename Each>
  void each(Each visit) {
    for (auto& [_, block] : blocks_) visit(block);
  }

 private:
  int file_;
  uint64_t start_, next_ = ALIGNMENT, used_ = 0;
  char* shown_;
  std::map<uint64_t, Block> blocks_;
  std::deque<uint64_t> dead_;
};

}  // namespace stand_in
