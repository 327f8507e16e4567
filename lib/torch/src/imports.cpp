#include "imports.h"

#include "asked.h"
#include "exports.h"
#include "on_device.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

namespace vpmm_torch {

/* ---- descriptions ---- */

struct Description {
  DescriptionHead head;
  std::vector<uint64_t> sizes; // of the parts, bytes
};

bool Imports::is_description(const std::string& text) {
  return text.size() >= sizeof(DescriptionHead) &&
         std::memcmp(text.data(), DescriptionHead::MAGIC, sizeof DescriptionHead::MAGIC) == 0;
}

static Description read_description(const std::string& text) {
  Description out;
  std::memcpy(&out.head, text.data(), sizeof out.head);
  size_t bytes = text.size() - sizeof out.head;
  TORCH_CHECK(bytes == out.head.parts * sizeof out.sizes[0] && out.head.parts > 0 &&
                  out.head.door_bytes <= sizeof out.head.door,
              "vpmm: what another process says of its memory was cut or changed on the way");
  out.sizes.resize(out.head.parts);
  std::memcpy(out.sizes.data(), text.data() + sizeof out.head, bytes);
  return out;
}

/* ---- the other process's door ---- */

static int knock(const DescriptionHead& head) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, head.door, head.door_bytes);
  auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + head.door_bytes);
  int peer = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  TORCH_CHECK(peer >= 0, "vpmm: memory of another process: socket: ", std::strerror(errno));
  limit_patience(peer);
  if (connect(peer, reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      send(peer, &head.number, sizeof head.number, MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof head.number)) {
    int error = errno;
    close(peer);
    TORCH_CHECK(false,
                "vpmm: the process that shares this memory cannot be asked for it: it has ended, or is in another "
                "network namespace (",
                std::strerror(error), ")");
  }
  if (!is_own_user(peer)) { // the name of a process that has ended is anybody's to take
    close(peer);
    TORCH_CHECK(false, "vpmm: the process that shares this memory has ended: another user's has taken its place");
  }
  return peer;
}

/* What the message brings. False: it says that there is none, or there is no message. */
static bool receive_some(int peer, Descriptors& out) {
  alignas(cmsghdr) char control[CMSG_SPACE(DESCRIPTORS_AT_ONCE * sizeof(int))] = {};
  DoorSays what = DoorSays::NONE;
  iovec body = {&what, sizeof what};
  msghdr message = {};
  message.msg_iov = &body;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  const size_t before = out.size();
  if (recvmsg(peer, &message, MSG_CMSG_CLOEXEC) != static_cast<ssize_t>(sizeof what))
    return false;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header; header = CMSG_NXTHDR(&message, header))
    if (header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS) {
      const auto* fds = reinterpret_cast<const int*>(CMSG_DATA(header));
      for (size_t i = 0; i < (header->cmsg_len - CMSG_LEN(0)) / sizeof(int); i++)
        out.push_back(std::make_shared<Descriptor>(fds[i]));
    }
  bool is_cut = message.msg_flags & MSG_CTRUNC; // no descriptors are left to this process
  return what == DoorSays::TAKE && out.size() > before && !is_cut;
}

static void ask_for(const Description& description, Descriptors& out) {
  int peer = knock(description.head);
  auto hang_up = c10::make_scope_exit([&] { close(peer); });
  while (out.size() < description.sizes.size())
    TORCH_CHECK(receive_some(peer, out),
                "vpmm: the process that shares this memory does not give it: the tensor has ended "
                "there, the process is another user's, or this one has too many open files");
}

/* ---- imports ---- */

static void check_driver(CUresult result, const char* call) {
  TORCH_CHECK(result == CUDA_SUCCESS, "vpmm: memory of another process cannot be mapped: ", call, " answers ",
              static_cast<int>(result));
}

class Import {
 public:
  Import(const vpmm_driver& driver, int device) : driver_(driver), device_(device) {}
  Import(const Import&) = delete;
  Import& operator=(const Import&) = delete;

  ~Import() {
    OnDevice on(device_);
    if (mapped_ && !has_waited())
      return;
    if (mapped_)
      driver_.cuMemUnmap(base_, mapped_);
    if (reserved_)
      driver_.cuMemAddressFree(base_, reserved_);
  }

  void map(const std::vector<uint64_t>& sizes, const Descriptors& descriptors) {
    size_t bytes = 0;
    for (uint64_t size : sizes)
      bytes += size;
    check_driver(driver_.cuMemAddressReserve(&base_, bytes, 0, 0, 0), "cuMemAddressReserve");
    reserved_ = bytes;
    for (size_t i = 0; i < sizes.size(); i++)
      map_part(sizes[i], descriptors[i]->fd);
    allow(device_);
    keep_a_byte();
  }

  void allow(int device) const {
    CUmemAccessDesc access = {};
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.location.id = device;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    check_driver(driver_.cuMemSetAccess(base_, mapped_, &access, 1), "cuMemSetAccess");
  }

  int device() const {
    return device_;
  }

  void* address() const {
    return reinterpret_cast<void*>(base_);
  }

 private:
  /* Of the driver's, for the wait at the end: the device may be full by then. */
  void keep_a_byte() {
    RelaxedMode relaxed;
    if (driver_.cuMemAlloc(&byte_, 1) != CUDA_SUCCESS)
      byte_ = 0;
  }

  /*
   * For all that uses it, at the end. By memory that is freed: a wait for the context, which is left where a device was
   * full at both times, ends each capture in it.
   */
  bool has_waited() {
    if (!byte_)
      keep_a_byte();
    RelaxedMode relaxed;
    return byte_ ? driver_.cuMemFree(byte_) == CUDA_SUCCESS : driver_.cuCtxSynchronize() == CUDA_SUCCESS;
  }

  /* The mapping holds the memory from then on. */
  void map_part(size_t bytes, int fd) {
    CUmemGenericAllocationHandle handle = 0;
    check_driver(driver_.cuMemImportFromShareableHandle(&handle, reinterpret_cast<void*>(static_cast<intptr_t>(fd)),
                                                        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
                 "cuMemImportFromShareableHandle");
    CUresult result = driver_.cuMemMap(base_ + mapped_, bytes, 0, handle, 0);
    driver_.cuMemRelease(handle);
    check_driver(result, "cuMemMap");
    mapped_ += bytes;
  }

  const vpmm_driver& driver_;
  const int device_;
  CUdeviceptr base_ = 0, byte_ = 0;
  size_t reserved_ = 0, mapped_ = 0; // bytes from the base on
};

std::shared_ptr<void> Imports::open(const vpmm_driver& driver, int device, const std::string& description) {
  const Description read = read_description(description);
  std::lock_guard<std::mutex> guard(lock_);
  std::shared_ptr<Import> import = imports_[description].lock();
  if (!import) {
    Descriptors descriptors;
    import = std::make_shared<Import>(driver, device);
    ask_for(read, descriptors);
    import->map(read.sizes, descriptors);
    for (auto [owner, peer] : peers_)
      if (owner == device)
        import->allow(peer);
    for (auto it = imports_.begin(); it != imports_.end();)
      it = it->second.expired() ? imports_.erase(it) : std::next(it);
    imports_[description] = import;
  }
  return {import, import->address()};
}

void Imports::allow(int device, int owner) {
  std::lock_guard<std::mutex> guard(lock_);
  peers_.emplace(owner, device); // also once more: it may have failed for some
  for (const auto& [description, known] : imports_)
    if (std::shared_ptr<Import> import = known.lock(); import && import->device() == owner)
      import->allow(device);
}

} // namespace vpmm_torch
