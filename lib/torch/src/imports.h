/*
 * imports.h - memory of other processes, which have shared it (exports.h).
 *
 *   import   a range of addresses of this process's own, at which the parts of another's allocation are mapped, in
 *            order. There is one for a description, while anybody has its pointer; then the device is waited for and the
 *            range is unmapped. Where the wait is refused, as in a capture, it stays
 *   peer     another device that may use the memory of the import's
 */
#ifndef VPMM_TORCH_IMPORTS_H
#define VPMM_TORCH_IMPORTS_H

#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>

#include <vpmm/vpmm.h>

namespace vpmm_torch {

class Import;

class Imports {
 public:
  static bool is_description(const std::string& text);

  /* The first part's address, on the device, which is current. Asks the other process. Throws. */
  std::shared_ptr<void> open(const vpmm_driver& driver, int device, const std::string& description);

  /* `device` may use what `owner` imports from now on, and has imported. */
  void allow(int device, int owner);

 private:
  std::mutex lock_; // over an import: two of one description are one
  std::unordered_map<std::string, std::weak_ptr<Import>> imports_;
  std::set<std::pair<int, int>> peers_; // owner, device
};

} // namespace vpmm_torch

#endif
