// Runs every launcher of csrc/cuda on windows of its own and compares with plain loops: driver few|small|large|deep.
// Sizes around every bound of packs and tiles, once each and with every mixture of dtypes; more segments than the
// arguments of a launch take; more tiles than one block adds up.
#include <string>

#include "windows.h"

namespace driver {
namespace {

namespace cuda = fusedaccum::cuda;

constexpr int64_t kSizes[] = {0, 1, 7, 8, 15, 16, 17, 63, 64, 65, 4095, 4096, 4097, 9000};

// 14 sizes and 9 mixtures of dtypes (steps.cpp): 126 segments hold every pair.
std::vector<int64_t> edge_sizes(int64_t count) {
  std::vector<int64_t> sizes(count);
  for (size_t k = 0; k < sizes.size(); ++k) sizes[k] = kSizes[k % 14];
  return sizes;
}

std::vector<int64_t> many_sizes(int64_t count) {
  std::vector<int64_t> sizes(count);
  for (int64_t k = 0; k < count; ++k) sizes[k] = k % 7 ? k % 5 : 70;
  return sizes;
}

// The sum of the squares of n elements of flat, and what float64 may err in any order of additions.
struct Squares {
  double sum = 0, bound = 0;
  Squares(const float* x, int64_t n) {
    for (int64_t i = 0; i < n; ++i) sum += double(x[i]) * x[i];
    bound = sum * double(n) * 0x1p-52;
  }
};

void check_partials(Checks& checks, const Window& w, const std::vector<double>& partials, const Tensors& grads) {
  for (size_t t = 0; t < partials.size(); ++t) {
    const Tile& tile = w.tiles[t];
    if (grads[tile.segment].absent()) {
      checks.equal(partials[t], -1, "partials", tile.segment, int64_t(t));
    } else {
      const Squares right(w.flat.floats() + tile.flat_start, tile.count);
      checks.near(partials[t], right.sum, right.bound, "partials", tile.segment, int64_t(t));
    }
  }
}

// Every third segment has no gradient this time. One dtype after the other, so that a launch has all of them.
Tensors make_gradients(const Window& w, Random& random, int turn) {
  Tensors grads(w.count());
  for (int64_t k = 0; k < w.count(); ++k)
    if ((k + turn) % 3) grads[k] = tensor_for(k, kDTypes[k / 2 % 3], w.numel[k], random, -2, 2);
  return grads;
}

// One micro-batch. The product and the sum are rounded once (fma), so plain arithmetic gives the same bits.
void check_one_fold(Checks& checks, const Device& device, Window& w, const Tensors& grads, float scale, bool norm) {
  checks.op = "fold";
  const std::vector<float> before = copy_of_flat(w), scales(1, scale);
  const std::vector<uint8_t> old_marks = w.marks;
  std::vector<double> partials(w.tiles.size(), -1);
  const std::vector<Elements> lists = elements_of(grads);
  w.live.assign(norm ? w.count() : 0, 0);
  cuda::fold(device, w.buffer(), lists.data(), scales.data(), norm ? partials.data() : nullptr);
  for (int64_t k = 0; k < w.count(); ++k)
    if (!grads[k].absent()) w.marks[k] = uint8_t(kTouched | (norm ? kFresh : 0));
  checks.flat(w, before, [&](int64_t k, int64_t i, float old) {
    const bool first = !(old_marks[k] & kTouched);
    if (grads[k].absent()) return old;
    if (scale == 0) return first ? 0.0f : old;
    const float g = float(grads[k].get(i));
    return first ? scale * g : std::fma(scale, g, old);
  });
  for (int64_t k = 0; k < int64_t(w.live.size()); ++k)
    checks.equal(w.live[k], !grads[k].absent() && w.numel[k] > 0 && scale != 0, "live", k, 0);
  w.live.clear();
  if (norm) check_partials(checks, w, partials, grads);
}

// Clean gradients, then one element that is not finite: at either end of tensors from the first to the last.
void check_found_inf(Checks& checks, const Device& device, const Window& w, Random& random) {
  checks.op = "found_inf";
  Tensors grads = make_gradients(w, random, 1);
  std::vector<float> found(1, 7);
  cuda::found_inf(device, w.buffer(), elements_of(grads).data(), found.data());
  checks.equal(found[0], 0, "found_inf", -1, 0);
  const float values[] = {INFINITY, -INFINITY, NAN};
  const int64_t places = std::min<int64_t>(w.count(), 64);
  for (int64_t n = 0; n < places; ++n) {
    const int64_t k = n * (w.count() - 1) / (places - 1);
    if (grads[k].absent() || w.numel[k] == 0) continue;
    const int64_t at = n % 2 ? 0 : w.numel[k] - 1;
    const float before = float(grads[k].get(at));
    grads[k].set(at, values[n % 3]);
    cuda::found_inf(device, w.buffer(), elements_of(grads).data(), found.data());
    checks.equal(found[0], 1, "found_inf", k, at);
    grads[k].set(at, before);
  }
}

void check_fold(Checks& checks, const Device& device, Window& w, Random& random) {
  check_one_fold(checks, device, w, make_gradients(w, random, 0), 0.25f, false);
  check_one_fold(checks, device, w, make_gradients(w, random, 1), 0.3f, false);
  check_one_fold(checks, device, w, make_gradients(w, random, 2), 0.7f, true);
}

// With a scale of 0 what is not finite leaves no trace, on a first touch either.
void check_fold_of_nothing(Checks& checks, const Device& device, Window& w, Random& random) {
  for (int turn = 0; turn < 2; ++turn) {
    Tensors grads = make_gradients(w, random, turn);
    for (Tensor& grad : grads)
      for (int64_t i = 0; i < grad.numel(); ++i) grad.set(i, i % 2 ? NAN : -HUGE_VAL);
    check_one_fold(checks, device, w, grads, 0, true);
  }
}

// Of the first `stale` segments some have no partials yet.
void check_square_total(Checks& checks, const Device& device, Window& w, Random& random, int64_t stale) {
  checks.op = "square_total";
  w.touch(random);
  std::vector<double> partials(w.tiles.size(), NAN);  // those of untouched segments must not be looked at
  double right = 0, bound = 0;
  for (int64_t k = 0; k < w.count(); ++k)
    if (w.touched(k) && (k % 5 || k >= stale)) w.marks[k] |= kFresh;
  for (size_t t = 0; t < w.tiles.size(); ++t) {
    const Tile& tile = w.tiles[t];
    if (!w.touched(tile.segment)) continue;
    const Squares squares(w.flat.floats() + tile.flat_start, tile.count);
    if (w.marks[tile.segment] & kFresh) partials[t] = squares.sum;
    right += squares.sum;
    bound += squares.bound;
  }
  bound += right * double(w.tiles.size()) * 0x1p-52;
  std::vector<double> total(kTotal, 0), again_partials = partials;
  cuda::square_total(device, w.buffer(), partials.data(), total.data());
  checks.near(total[0], right, bound, "total", -1, 0);
  const double first = total[0];
  total[0] = -7;
  cuda::square_total(device, w.buffer(), again_partials.data(), total.data());
  checks.equal(total[0], first, "total, once more", -1, 0);
  for (size_t t = 0; t < w.tiles.size(); ++t)
    checks.equal(partials[t], again_partials[t], "partials", w.tiles[t].segment, int64_t(t));
}

void check_no_segments(Checks& checks, const Device& device) {
  checks.op = "square_total of nothing";
  Window w({0, 0, 5});  // the only one with elements is not touched
  std::vector<double> total(kTotal, 0), partials(1, NAN);
  total[0] = 9;
  cuda::square_total(device, w.buffer(), partials.data(), total.data());
  checks.equal(total[0], 0, "total", -1, 0);
}

void check_one_close(Checks& checks, const Device& device, Window& w, double total, double divisor, double max_norm,
                     bool skip_nonfinite = false) {
  checks.op = "close_window";
  const std::vector<double> totals(kTotal, total), divisors(1, divisor);
  std::vector<float> scalars(3, -1), steps(w.count(), 4);
  cuda::close_window(device, w.marks.data(), w.buffer().live, w.count(), scalars.data(), steps.data(), totals.data(),
                     divisors.data(), max_norm, skip_nonfinite);
  const bool skip = divisor == 0 || (skip_nonfinite && !std::isfinite(total));
  const double norm = divisor == 0 ? 0 : std::sqrt(total) / divisor;
  const double clip = max_norm / (norm + 1e-6);
  const double factor = std::isinf(max_norm) || clip >= 1 ? 1 : clip;
  checks.equal(scalars[0], skip ? 0.0f : float(1 / divisor * factor), "multiplier", -1, 0);
  checks.equal(scalars[1], skip, "skip", -1, 1);
  checks.equal(scalars[2], float(norm), "norm", -1, 2);
  for (int64_t k = 0; k < w.count(); ++k) checks.equal(steps[k], 4 + (w.counts(k) && !skip), "steps", k, 0);
}

void check_close_window(Checks& checks, const Device& device, Window& w, Random& random) {
  w.touch(random, true);
  for (const double total : {42.25, double(INFINITY), double(NAN)})
    check_one_close(checks, device, w, total, 3, 1, true);
  w.touch(random);
  for (const double max_norm : {HUGE_VAL, 0.5, 100.0}) check_one_close(checks, device, w, 42.25, 3, max_norm);
  check_one_close(checks, device, w, NAN, 3, 0.5);
  check_one_close(checks, device, w, NAN, 3, HUGE_VAL);
  check_one_close(checks, device, w, 42.25, 0, 0.5);
}

void check_rescale(Checks& checks, const Device& device, Window& w, Random& random) {
  checks.op = "rescale";
  w.touch(random);
  const std::vector<float> before = copy_of_flat(w), factor(1, 1.3f);
  cuda::rescale(device, w.buffer(), factor.data());
  checks.flat(w, before, [&](int64_t, int64_t, float old) { return old * 1.3f; });
}

void check_emit(Checks& checks, const Device& device, Window& w, Random& random, bool skip) {
  checks.op = skip ? "emit, skipped" : "emit";
  w.touch(random, true);
  Tensors grads = make_gradients(w, random, 0);
  std::vector<std::vector<char>> old;
  for (const Tensor& grad : grads) old.push_back(grad.bytes());
  const std::vector<float> before = copy_of_flat(w), scalars{0.3f, skip ? 1.0f : 0.0f, 5.0f};
  const std::vector<Elements> lists = elements_of(grads);
  cuda::emit(device, w.buffer(), scalars.data(), lists.data());
  checks.flat(w, before, [](int64_t, int64_t, float same) { return same; });
  for (int64_t k = 0; k < w.count(); ++k) {
    if (skip || !w.counts(k)) checks.same(grads[k], old[k], "grads", k);
    for (int64_t i = 0; !skip && w.counts(k) && i < grads[k].numel(); ++i)
      checks.equal(grads[k].get(i), rounded(before[w.offset[k] + i] * 0.3f, grads[k].dtype()), "grads", k, i);
  }
}

// The known answers that the authors of Philox publish with Random123; elements are counted in 64 bits.
void check_random(Checks& checks) {
  checks.op = "philox";
  const auto same = [&](const fusedaccum::Philox& found, const fusedaccum::Philox& right, int64_t which) {
    for (int w = 0; w < 4; ++w) checks.equal(found.word[w], right.word[w], "word", which, w);
  };
  using fusedaccum::host::philox, fusedaccum::host::random_block;
  const uint32_t ones = 0xffffffff;
  same(philox({{0, 0, 0, 0}}, 0), {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}}, 0);
  same(philox({{ones, ones, ones, ones}}, ~uint64_t(0)), {{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}}, 1);
  same(philox({{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, 0x299f31d0a4093822),
       {{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}, 2);
  const int64_t i = (int64_t(1) << 36) + 13;
  same(random_block({77, 5, 6}, i), philox({{1, 2, 5, 6}}, 77), 3);
}

void check_all(Checks& checks, const Device& device, const std::vector<int64_t>& sizes) {
  Random random(7);
  Window folded(sizes), zeros(sizes), w(sizes);
  check_random(checks);
  check_fold(checks, device, folded, random);
  check_fold_of_nothing(checks, device, zeros, random);
  check_square_total(checks, device, w, random, w.count());
  check_no_segments(checks, device);
  check_found_inf(checks, device, w, random);
  check_close_window(checks, device, w, random);
  check_rescale(checks, device, w, random);
  for (const bool skip : {false, true}) check_emit(checks, device, w, random, skip);
  for (const bool zero : {false, true}) {
    for (const bool stochastic : {false, true}) {
      for (const bool any_mix : {false, true}) check_adam(checks, device, w, random, any_mix, zero, stochastic);
      check_sgd(checks, device, w, random, zero, stochastic);
    }
    check_skip(checks, device, w, random, zero);
  }
}

// A launch takes 4,000 entries with wide arguments, 490 without; an update has up to five of them for each segment.
void check_many(Checks& checks, const Device& device) {
  Random random(11);
  Window folded(many_sizes(device.wide ? 4100 : 600)), w(many_sizes(device.wide ? 900 : 300));
  Window marked(many_sizes(device.wide ? 33000 : 4500));
  check_one_fold(checks, device, folded, make_gradients(folded, random, 0), 0.7f, true);
  check_close_window(checks, device, marked, random);
  check_square_total(checks, device, w, random, w.count());
  check_rescale(checks, device, w, random);
  check_found_inf(checks, device, folded, random);
  check_emit(checks, device, w, random, false);
  check_adam(checks, device, w, random, true, true, true);
  check_sgd(checks, device, w, random, false, true);
}

bool check(Checks& checks, const Device& device, const std::string& which) {
  if (which == "few") {
    check_all(checks, device, edge_sizes(14));
  } else if (which == "small") {
    check_all(checks, device, edge_sizes(126));
  } else if (which == "large") {
    check_many(checks, device);
  } else if (which == "deep") {
    Random random(13);
    Window w(many_sizes(11000));
    check_square_total(checks, device, w, random, 40);
  } else {
    return false;
  }
  return true;
}

}  // namespace
}  // namespace driver

int main(int argc, char** argv) {
  driver::Checks checks;
  for (const bool wide : {true, false}) {
    if (argc == 2 && driver::check(checks, {nullptr, wide}, argv[1])) continue;
    fprintf(stderr, "usage: driver few|small|large|deep\n");
    return 2;
  }
  printf("%d values checked\n", checks.count);
  return checks.failures > 0;
}
