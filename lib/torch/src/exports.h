/*
 * exports.h - live allocations that other processes may map, as torch.multiprocessing shares CUDA tensors; what the
 * others do is in imports.h.
 *
 *   part          a GPU handle behind an allocation, by where it is mapped, which live memory keeps as it is. Shared is
 *                 what the parts hold, so that neighbours may be among it, as where PyTorch's own allocator shares a
 *                 segment. It has one file descriptor, however many allocations it is behind: a process may have few
 *   export        of a live allocation, by its address: its parts. Made when the allocation is shared for the first time.
 *                 When it ends it lets go of them, and the last one closes a part's descriptor: who has mapped it until
 *                 then keeps the memory
 *   description   of an export, for who is to map it: whom to ask, for what, and the bytes of each part. It is sent as
 *                 PyTorch sends its own
 *   door          a socket, and a thread that hands descriptors out there, to processes of the same user. Opened by the
 *                 first export, and open until the process ends
 *
 * Another way to a descriptor is pidfd_getfd, which PyTorch's expandable segments take. Containers refuse it mostly,
 * and kernels between processes that are not each other's descendants.
 */
#ifndef VPMM_TORCH_EXPORTS_H
#define VPMM_TORCH_EXPORTS_H

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include <vpmm/vpmm.h>

namespace vpmm_torch {

/* Closes it in the end. */
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd(fd) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor();

  const int fd;
};

using Descriptors = std::vector<std::shared_ptr<Descriptor>>;

/* What stands at the beginning of a description. The bytes of each part follow, 8 bytes each. */
struct DescriptionHead {
  static constexpr char MAGIC[8] = {'v', 'p', 'm', 'm', 'i', 'p', 'c', '1'};

  char magic[8];
  char door[8]; // of a name in the kernel's own table of sockets, which begins with a zero
  uint64_t number;
  uint32_t door_bytes, parts;
};

/* An answer of the door: so many descriptors at once; NONE is all that there is, if the export has ended. */
constexpr size_t DESCRIPTORS_AT_ONCE = 16;
enum class DoorSays : char { TAKE, NONE };

/* Of either side of a talk at the door: a send or receive gives up after ten seconds. */
void limit_patience(int socket);

/* Whether the other side is a process of this user's, or root's. */
bool is_own_user(int peer);

class Door {
 public:
  /* Opens it once. Throws. `name`: whom to ask. */
  void open();

  const std::string& name() const { // of an open door
    return name_;
  }

  /* A number to ask for, which no other process gives. */
  uint64_t add(Descriptors descriptors);
  void remove(uint64_t number);

 private:
  void listen_and_name();
  void serve();
  void answer(int peer);
  Descriptors find(uint64_t number); // empty: there is none

  std::mutex lock_; // of all but what is constant once the door is open
  int socket_ = -1;
  std::string name_;
  uint64_t next_ = 0;
  std::unordered_map<uint64_t, Descriptors> handed_out_;
};

struct Export {
  std::string description;
  size_t offset; // of the allocation in the first part, bytes
  uint64_t number;
  std::vector<CUdeviceptr> parts;
};

class Exports {
 public:
  /* Of an allocation that does not end meanwhile; its device is current. Throws. */
  Export share(const vpmm_driver& driver, const void* address, size_t bytes);

  /* Whether anything is shared now. */
  bool are_any() const {
    return count_.load(std::memory_order_relaxed) != 0;
  }

  /* The allocation ends, or what is behind it. */
  void end(const void* address) {
    if (count_.load(std::memory_order_acquire)) // who frees has seen that it was shared: the program's own order
      end_shared(address);
  }

 private:
  struct Part {
    std::shared_ptr<Descriptor> descriptor;
    size_t exports = 0;
  };

  bool find(const void* address, Export& out);
  Export make(const vpmm_driver& driver, const void* address, size_t bytes);
  std::shared_ptr<Descriptor> hold_part(const vpmm_driver& driver, CUdeviceptr base);
  void let_go(CUdeviceptr base); // under the lock
  void end_shared(const void* address);

  Door door_;
  std::atomic<size_t> count_{0};
  std::mutex lock_; // of the tables
  std::unordered_map<const void*, Export> exports_;
  std::unordered_map<CUdeviceptr, Part> parts_;
};

} // namespace vpmm_torch

#endif
