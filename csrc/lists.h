// Lists of tensors as the dispatcher hands them over: one handle for each entry, and nothing beside it. What torch
// makes of such an argument by itself, a std::vector<std::optional<Tensor>>, allocates once more for each tensor.
#pragma once

#include <torch/csrc/stable/library.h>

#include <vector>

// Of Python's C interface, without its headers; null in a process without an interpreter.
extern "C" {
__attribute__((weak)) int Py_IsInitialized(void);
__attribute__((weak)) int PyGILState_Ensure(void);
__attribute__((weak)) void PyGILState_Release(int);
}

namespace fusedaccum {

// Holds Python's lock. The last handle of a tensor that a Python object shares gives that object back, and takes the
// lock to do so: once for a whole list where it is held already, else once for each tensor, and another thread of
// Python may come in between every time.
class PythonLock {
 public:
  PythonLock() {
    if (held_) state_ = PyGILState_Ensure();
  }
  ~PythonLock() {
    if (held_) PyGILState_Release(state_);
  }
  PythonLock(const PythonLock&) = delete;
  PythonLock& operator=(const PythonLock&) = delete;

 private:
  const bool held_ = Py_IsInitialized && Py_IsInitialized();
  int state_ = 0;
};

// Owns its tensors. kOptional: entries may be None, whose handle is null.
template <bool kOptional>
class TensorList {
 public:
  explicit TensorList(StableListHandle list) {
    size_t size = 0;
    check(torch_list_size(list, &size));
    handles_.reserve(size);
    for (size_t i = 0; i < size; ++i) {
      StableIValue entry = 0;
      check(torch_list_get_item(list, i, &entry));
      handles_.push_back(handle_of(entry));
    }
    check(torch_delete_list(list));
  }
  TensorList(TensorList&&) = default;  // leaves the other one empty
  TensorList(const TensorList&) = delete;
  TensorList& operator=(const TensorList&) = delete;
  ~TensorList() {
    if (handles_.empty()) return;
    const PythonLock lock;
    for (AtenTensorHandle handle : handles_)
      if (handle) aoti_torch_delete_tensor_object(handle);
  }

  size_t size() const { return handles_.size(); }
  bool empty() const { return handles_.empty(); }
  AtenTensorHandle operator[](size_t i) const { return handles_[i]; }

 private:
  static AtenTensorHandle handle_of(StableIValue entry) {
    if (!kOptional) return torch::stable::detail::to<AtenTensorHandle>(entry);
    return torch::stable::detail::to<std::optional<AtenTensorHandle>>(entry).value_or(nullptr);
  }
  static void check(AOTITorchError error) {
    if (error != AOTI_TORCH_SUCCESS) throw std::runtime_error("fusedaccum: torch could not hand a list over");
  }

  std::vector<AtenTensorHandle> handles_;
};

using Tensors = TensorList<false>;
using OptionalTensors = TensorList<true>;

}  // namespace fusedaccum

// How TORCH_BOX makes such a list of what is on the dispatcher's stack.
namespace torch::stable::detail {

template <bool kOptional>
struct ToImpl<fusedaccum::TensorList<kOptional>> {
  template <class... Versions>
  static fusedaccum::TensorList<kOptional> call(StableIValue value, Versions...) {
    return fusedaccum::TensorList<kOptional>(to<StableListHandle>(value));
  }
};

}  // namespace torch::stable::detail
