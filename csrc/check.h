// Every check of an argument, made before anything is written. A message names the operator, the argument with its
// index, the rule, the value seen and the way out.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "tiles.h"

namespace fusedaccum {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;
using OptionalTensor = std::optional<Tensor>;
using OptionalTensors = std::vector<std::optional<Tensor>>;

constexpr const char* kPlanWayOut = "pass the tensors that the flat buffer was planned with";

template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

inline std::string dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float:
      return "torch.float32";
    case ScalarType::Double:
      return "torch.float64";
    case ScalarType::BFloat16:
      return "torch.bfloat16";
    case ScalarType::Half:
      return "torch.float16";
    case ScalarType::Long:
      return "torch.int64";
    case ScalarType::Byte:
      return "torch.uint8";
    default:
      return torch::headeronly::toString(dtype);
  }
}

// Type and index. The getters write through pointers and cannot fail on a tensor that an operator was called with.
struct Place {
  int32_t type, index = -1;

  explicit Place(int32_t device_type) : type(device_type) {}
  explicit Place(const Tensor& t) {
    aoti_torch_get_device_type(t.get(), &type);
    aoti_torch_get_device_index(t.get(), &index);
  }
  bool operator!=(const Place& other) const { return type != other.type || index != other.index; }
  std::string name() const {
    const std::string number = index < 0 ? "" : text(":", index);
    if (type == aoti_torch_device_type_cpu()) return "cpu";
    if (type == aoti_torch_device_type_cuda()) return "cuda" + number;
    return text("a device of type ", type, number);
  }
};

inline std::string shape_name(const std::vector<int64_t>& shape) {
  std::string out = "(";
  for (size_t d = 0; d < shape.size(); ++d) out += text(d ? ", " : "", shape[d] < 0 ? "any" : text(shape[d]));
  return out + ")";
}

// The checks of one call of one operator. Texts are only put together for an error.
class Check {
 public:
  // leader: the tensor whose device all others share; its device type is the one that the operator was written for.
  Check(const char* op, const char* name, const Tensor& leader, int32_t device_type) : op_(op), place_(leader) {
    if (place_.type != device_type)
      fail(name, "be on " + Place(device_type).name(), place_.name(), "move it, or use another backend");
  }

  // One tensor with a fixed dtype and shape; -1 stands for any size.
  void one(const char* name, const Tensor& t, ScalarType dtype, const std::vector<int64_t>& shape) const {
    one(name, t, dtype, shape, place_);
  }
  void one_on_cpu(const char* name, const Tensor& t, ScalarType dtype, const std::vector<int64_t>& shape) const {
    one(name, t, dtype, shape, Place(aoti_torch_device_type_cpu()));
  }

  // Entry k of a list: as many elements as its segment, float32, bfloat16 or float16, contiguous, on the device.
  Elements entry(const char* name, int64_t k, const Tensor& t, int64_t numel, bool only_float32 = false) const {
    int32_t layout, dtype;
    aoti_torch_get_layout(t.get(), &layout);
    aoti_torch_get_dtype(t.get(), &dtype);
    if (layout != strided_) fail(at(name, k), "be dense", "a sparse tensor", "pass .to_dense()");
    if (dtype != float32_ && (only_float32 || (dtype != bfloat16_ && dtype != float16_)))
      fail(at(name, k), only_float32 ? "be torch.float32" : "be torch.float32, torch.bfloat16 or torch.float16",
           dtype_name(t.scalar_type()), "convert it first, or leave its parameter out of the flat buffer");
    if (Place(t) != place_) fail(at(name, k), "be on " + place_.name(), Place(t).name(), move_to(place_));
    if (t.numel() != numel)
      fail(at(name, k), text("have ", numel, " elements, as its segment has"), text(t.numel()), kPlanWayOut);
    if (!t.is_contiguous())
      fail(at(name, k), "be contiguous", "a tensor that is not", "pass .contiguous(), or a view in memory order");
    const DType as = dtype == float32_ ? DType::kFloat32 : dtype == float16_ ? DType::kFloat16 : DType::kBFloat16;
    return {t.data_ptr(), as};
  }

  void length(const char* name, size_t size, int64_t segments) const {
    if (int64_t(size) != segments)
      fail(name, text("have ", segments, " entries, one for each segment"), text(size), kPlanWayOut);
  }

  [[noreturn]] void fail(const std::string& what, const std::string& rule, const std::string& seen,
                         const std::string& way_out) const {
    throw std::runtime_error(text(op_, ": ", what, " must ", rule, ", got ", seen, "; ", way_out));
  }

  static std::string at(const char* name, int64_t k) { return text(name, "[", k, "]"); }

  const char* op() const { return op_; }

 private:
  void one(const char* name, const Tensor& t, ScalarType dtype, const std::vector<int64_t>& shape, Place place) const {
    if (t.scalar_type() != dtype)
      fail(name, "be " + dtype_name(dtype), dtype_name(t.scalar_type()),
           text("pass ", name, ".to(", dtype_name(dtype), ")"));
    std::vector<int64_t> sizes;
    for (int64_t d = 0; d < t.dim(); ++d) sizes.push_back(t.size(d));
    bool fits = sizes.size() == shape.size();
    for (size_t d = 0; fits && d < shape.size(); ++d) fits = shape[d] < 0 || sizes[d] == shape[d];
    if (!fits) fail(name, "have shape " + shape_name(shape), shape_name(sizes), kPlanWayOut);
    if (Place(t) != place) fail(name, "be on " + place.name(), Place(t).name(), move_to(place));
    if (!t.is_contiguous()) fail(name, "be contiguous", "a tensor that is not", "pass .contiguous()");
  }

  static std::string move_to(Place place) { return text("move it with .to('", place.name(), "')"); }

  const char* op_;
  Place place_;
  const int32_t strided_ = aoti_torch_layout_strided();
  const int32_t float32_ = aoti_torch_dtype_float32();
  const int32_t bfloat16_ = aoti_torch_dtype_bfloat16();
  const int32_t float16_ = aoti_torch_dtype_float16();
};

// Where the segments lie: `flat`, `marks`, `segments` and `tiles` fit each other.
struct Plan {
  const Segment* segments;
  int64_t count;
  std::vector<int64_t> first_tile;  // of each segment in the table of tiles

  Plan(const Check& check, const Tensor& flat, const Tensor& marks, const Tensor& segment_table, const Tensor& tiles) {
    check.one("flat", flat, ScalarType::Float, {-1});
    check.one_on_cpu("segments", segment_table, ScalarType::Long, {-1, 2});
    segments = static_cast<const Segment*>(segment_table.data_ptr());
    count = segment_table.size(0);
    check.one_on_cpu("marks", marks, ScalarType::Byte, {count});
    const int64_t tile_count = place_segments(check, flat.numel());
    check.one("tiles", tiles, ScalarType::Long, {tile_count, 4});
  }

  // The table of tiles, where the host can read it: every record of segment k says where that part of it lies.
  void check_tiles(const Check& check, const Tile* tiles, int64_t k) const {
    for (int64_t i = 0; i < tiles_of(segments[k].numel); ++i) {
      const Tile& t = tiles[first_tile[k] + i];
      const int64_t start = i * kTile, flat_start = segments[k].offset + start;
      const int64_t elements = std::min(kTile, segments[k].numel - start);
      if (t.segment != k || t.start != start || t.flat_start != flat_start || t.count != elements)
        check.fail(check.at("tiles", first_tile[k] + i),
                   text("be (", k, ", ", start, ", ", flat_start, ", ", elements, ")"),
                   text("(", t.segment, ", ", t.start, ", ", t.flat_start, ", ", t.count, ")"), kPlanWayOut);
    }
  }

 private:
  int64_t place_segments(const Check& check, int64_t flat_numel) {
    first_tile.resize(count);
    int64_t tile_count = 0, end = 0;
    for (int64_t k = 0; k < count; ++k) {
      const auto [offset, numel] = segments[k];
      if (numel < 0 || offset < end || offset % kAlign != 0 || numel > flat_numel - offset)
        check.fail(check.at("segments", k),
                   text("start at a multiple of ", kAlign, ", after the segments before it (", end,
                        "), and end inside the ", flat_numel, " elements of flat"),
                   text("offset ", offset, ", numel ", numel), kPlanWayOut);
      first_tile[k] = tile_count;
      tile_count += tiles_of(numel);
      end = offset + numel;
    }
    return tile_count;
  }
};

}  // namespace fusedaccum
