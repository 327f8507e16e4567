#include "exports.h"

#include <cerrno>
#include <cstring>
#include <ctime>
#include <random>
#include <thread>

#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

namespace vpmm_torch {

Descriptor::~Descriptor() {
  close(fd);
}

/* ---- the door ---- */

static void check_system(bool is_fine, const char* call) {
  TORCH_CHECK(is_fine, "vpmm: sharing memory with other processes: ", call, ": ", std::strerror(errno));
}

/* The kernel gives a name that no other socket has: bound to an address without one. */
void Door::listen_and_name() {
  sockaddr_un address = {};
  socklen_t length = sizeof address;
  address.sun_family = AF_UNIX;
  check_system(bind(socket_, reinterpret_cast<sockaddr*>(&address), sizeof address.sun_family) == 0, "bind");
  check_system(listen(socket_, SOMAXCONN) == 0, "listen");
  check_system(getsockname(socket_, reinterpret_cast<sockaddr*>(&address), &length) == 0, "getsockname");
  name_.assign(address.sun_path, length - offsetof(sockaddr_un, sun_path));
  TORCH_CHECK(name_.size() <= sizeof DescriptionHead::door, "vpmm: the kernel's name of a socket is too long");
}

void Door::open() {
  std::lock_guard<std::mutex> guard(lock_);
  if (!name_.empty())
    return;
  std::random_device random;
  next_ = uint64_t{random()} << 32 | random();
  socket_ = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  check_system(socket_ >= 0, "socket");
  sigset_t all, former; // the program's signal handlers do not run on the thread
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &former);
  try {
    listen_and_name();
    std::thread(&Door::serve, this).detach();
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &former, nullptr);
    close(socket_);
    name_.clear();
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &former, nullptr);
}

void Door::serve() {
  for (;;) {
    int peer = accept4(socket_, nullptr, nullptr, SOCK_CLOEXEC);
    if (peer >= 0) {
      answer(peer);
      close(peer);
    } else if (errno != EINTR && errno != ECONNABORTED) {
      const timespec pause = {0, 10000000}; // there is no descriptor, or no memory: it may be better soon
      nanosleep(&pause, nullptr);
    }
  }
}

static bool send_some(int peer, DoorSays what, const Descriptors& all, size_t first, size_t count) {
  alignas(cmsghdr) char control[CMSG_SPACE(DESCRIPTORS_AT_ONCE * sizeof(int))] = {};
  iovec body = {&what, sizeof what};
  msghdr message = {};
  message.msg_iov = &body;
  message.msg_iovlen = 1;
  if (count) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(count * sizeof(int));
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(count * sizeof(int));
    for (size_t i = 0; i < count; i++)
      std::memcpy(CMSG_DATA(header) + i * sizeof(int), &all[first + i]->fd, sizeof(int));
  }
  constexpr int TRIES = 500;
  const timespec pause = {0, 10000000};
  ssize_t sent = sendmsg(peer, &message, MSG_NOSIGNAL);
  for (int i = 0; i < TRIES && sent < 0 && errno == ETOOMANYREFS; i++) { // the user's, on their way to other processes
    nanosleep(&pause, nullptr);
    sent = sendmsg(peer, &message, MSG_NOSIGNAL);
  }
  return sent == static_cast<ssize_t>(sizeof what);
}

void limit_patience(int socket) {
  const timeval patience = {10, 0};
  setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
}

bool is_own_user(int peer) {
  ucred credentials = {};
  socklen_t length = sizeof credentials;
  return getsockopt(peer, SOL_SOCKET, SO_PEERCRED, &credentials, &length) == 0 &&
         (credentials.uid == geteuid() || credentials.uid == 0);
}

void Door::answer(int peer) {
  uint64_t number = 0;
  limit_patience(peer);
  if (!is_own_user(peer) || recv(peer, &number, sizeof number, 0) != static_cast<ssize_t>(sizeof number))
    return;
  const Descriptors found = find(number);
  if (found.empty()) {
    send_some(peer, DoorSays::NONE, found, 0, 0);
    return;
  }
  for (size_t sent = 0, some; sent < found.size(); sent += some) {
    some = std::min(found.size() - sent, DESCRIPTORS_AT_ONCE);
    if (!send_some(peer, DoorSays::TAKE, found, sent, some))
      return;
  }
}

Descriptors Door::find(uint64_t number) {
  std::lock_guard<std::mutex> guard(lock_);
  auto found = handed_out_.find(number);
  return found == handed_out_.end() ? Descriptors() : found->second;
}

uint64_t Door::add(Descriptors descriptors) {
  std::lock_guard<std::mutex> guard(lock_);
  handed_out_.emplace(++next_, std::move(descriptors));
  return next_;
}

void Door::remove(uint64_t number) {
  std::lock_guard<std::mutex> guard(lock_);
  handed_out_.erase(number);
}

/* ---- exports ---- */

static void check_driver(CUresult result, const char* call) {
  TORCH_CHECK(result == CUDA_SUCCESS, "vpmm: memory cannot be shared with other processes: ", call, " answers ",
              static_cast<int>(result),
              " (it needs a device that exports handles as file descriptors, and no "
              "VPMM_EXPORTABLE=0)");
}

static std::shared_ptr<Descriptor> export_part(const vpmm_driver& driver, CUdeviceptr address) {
  CUmemGenericAllocationHandle handle = 0;
  int fd = -1;
  check_driver(driver.cuMemRetainAllocationHandle(&handle, reinterpret_cast<void*>(address)),
               "cuMemRetainAllocationHandle");
  CUresult result = driver.cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
  driver.cuMemRelease(handle);
  check_driver(result, "cuMemExportToShareableHandle");
  return std::make_shared<Descriptor>(fd);
}

/* Not under the lock, because to export a handle takes a millisecond, and frees look at the tables meanwhile. */
std::shared_ptr<Descriptor> Exports::hold_part(const vpmm_driver& driver, CUdeviceptr base) {
  std::unique_lock<std::mutex> guard(lock_);
  auto found = parts_.find(base);
  if (found == parts_.end()) {
    guard.unlock();
    std::shared_ptr<Descriptor> exported = export_part(driver, base);
    guard.lock();
    found = parts_.try_emplace(base, Part{std::move(exported)}).first; // another thread may have been quicker
  }
  found->second.exports++;
  return found->second.descriptor;
}

void Exports::let_go(CUdeviceptr base) {
  auto found = parts_.find(base);
  if (--found->second.exports == 0)
    parts_.erase(found);
}

Export Exports::make(const vpmm_driver& driver, const void* address, size_t bytes) {
  const auto first = reinterpret_cast<CUdeviceptr>(address);
  Descriptors descriptors; // NULL: the part is not held yet
  std::vector<uint64_t> sizes;
  Export made = {};
  auto undo = c10::make_scope_exit([&] {
    std::lock_guard<std::mutex> guard(lock_);
    for (size_t i = 0; i < descriptors.size(); i++)
      if (descriptors[i])
        let_go(made.parts[i]);
  });
  for (CUdeviceptr at = first; at < first + bytes;) {
    CUdeviceptr base = 0;
    size_t size = 0;
    check_driver(driver.cuMemGetAddressRange(&base, &size, at), "cuMemGetAddressRange");
    if (at == first)
      made.offset = first - base;
    made.parts.push_back(base);
    sizes.push_back(size);
    descriptors.emplace_back();
    descriptors.back() = hold_part(driver, base);
    at = base + size;
  }
  made.number = door_.add(descriptors);
  DescriptionHead head = {};
  std::memcpy(head.magic, DescriptionHead::MAGIC, sizeof head.magic);
  std::memcpy(head.door, door_.name().data(), door_.name().size());
  head.door_bytes = static_cast<uint32_t>(door_.name().size());
  head.number = made.number;
  head.parts = static_cast<uint32_t>(sizes.size());
  made.description.assign(reinterpret_cast<const char*>(&head), sizeof head);
  made.description.append(reinterpret_cast<const char*>(sizes.data()), sizes.size() * sizeof sizes[0]);
  undo.release();
  return made;
}

bool Exports::find(const void* address, Export& out) {
  std::lock_guard<std::mutex> guard(lock_);
  auto found = exports_.find(address);
  if (found == exports_.end())
    return false;
  out = found->second;
  return true;
}

Export Exports::share(const vpmm_driver& driver, const void* address, size_t bytes) {
  Export out;
  if (find(address, out))
    return out;
  door_.open();
  out = make(driver, address, bytes);
  std::lock_guard<std::mutex> guard(lock_);
  auto [entry, is_new] = exports_.emplace(address, out);
  if (is_new) {
    count_.fetch_add(1, std::memory_order_release);
  } else { // another thread was quicker
    door_.remove(out.number);
    for (CUdeviceptr base : out.parts)
      let_go(base);
  }
  return entry->second;
}

void Exports::end_shared(const void* address) {
  std::lock_guard<std::mutex> guard(lock_);
  auto found = exports_.find(address);
  if (found == exports_.end())
    return;
  door_.remove(found->second.number);
  for (CUdeviceptr base : found->second.parts)
    let_go(base);
  exports_.erase(found);
  count_.fetch_sub(1, std::memory_order_relaxed);
}

} // namespace vpmm_torch
