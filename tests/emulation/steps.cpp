// Checks of the update rules, against float64 arithmetic and what float32 may err on the way.
#include "windows.h"

namespace driver {
namespace {

constexpr double kUlp = 0x1p-24;  // the largest relative error of one rounding to float32

struct Mix {
  DType param, exp_avg, exp_avg_sq;
  bool master, max_exp_avg_sq;
};

constexpr DType kF32 = DType::kFloat32, kBF16 = DType::kBFloat16, kF16 = DType::kFloat16;

// Those that csrc/cuda has code of their own for.
constexpr Mix kCommon[] = {
    {kF32, kF32, kF32, false, false},  {kF32, kBF16, kBF16, false, false}, {kBF16, kF32, kF32, true, false},
    {kBF16, kF32, kF32, false, false}, {kBF16, kBF16, kBF16, true, false}, {kBF16, kBF16, kBF16, false, false},
    {kF16, kF32, kF32, true, false},   {kF16, kF32, kF32, false, false},   {kF16, kF16, kF16, false, false},
};

Mix mix_of(int64_t k, bool any_mix, Random& random) {
  if (!any_mix) return kCommon[k % 9];
  const auto dtype = [&] { return kDTypes[random() % 3]; };
  const DType param = dtype();
  return {param, dtype(), dtype(), param != kF32 && random() % 2 == 0, random() % 2 == 0};
}

// lr, beta1, beta2, eps, weight_decay, decoupled, amsgrad, maximize
const std::vector<double> kAdamHyper = {
    1e-2, 0.9, 0.999, 1e-8, 0.1,  1, 0, 0,  //
    2e-2, 0.8, 0.99,  1e-6, 0.05, 0, 1, 0,  //
    3e-2, 0.7, 0.95,  1e-3, 0,    1, 1, 1,  //
    1e-2, 0.9, 0.999, 1e-8, 0,    0, 0, 1,
};
// lr, momentum, dampening, weight_decay, nesterov, maximize
const std::vector<double> kSgdHyper = {
    0.1,  0.9, 0,   0.01, 0, 0,  //
    0.2,  0.8, 0,   0,    1, 1,  //
    0.1,  0.7, 0.5, 0.05, 0, 0,  //
    0.05, 0,   0,   0.02, 0, 0,
};
constexpr int kGroups = 4;

// A window with all that an update takes, the values from before, and copies of every byte.
struct Step {
  static constexpr int kLists = 5;
  Window& window;
  Tensors lists[kLists];
  std::vector<Elements> elements[kLists];
  std::vector<float> scalars, steps, flat_before;
  std::vector<int64_t> groups, random;  // random: empty where everything is rounded to nearest
  std::vector<std::vector<char>> bytes[kLists];
  std::vector<std::vector<double>> before[kLists];

  Step(Window& w, Random& random, float skip) : window(w), scalars{0.3f, skip, 5.0f} {
    w.touch(random, true);
    flat_before = copy_of_flat(w);
    steps = std::vector<float>(w.count());
    groups = std::vector<int64_t>(w.count());
    for (int64_t k = 0; k < w.count(); ++k) {
      steps[k] = k % 3 ? float(k % 20 + 1) : 1.0f;
      groups[k] = int64_t(random() % kGroups);
    }
    for (Tensors& list : lists) list = Tensors(w.count());
  }

  void add(int list, int64_t k, DType dtype, Random& random, double low, double high) {
    lists[list][k] = tensor_for(k + list, dtype, window.numel[k], random, low, high);
  }

  void round_stochastically() {
    random = {int64_t(1) << 40, 7};
    for (int64_t k = 0; k < window.count(); ++k) random.push_back(k);
  }

  void remember() {
    for (int list = 0; list < kLists; ++list) {
      elements[list] = elements_of(lists[list]);
      for (const Tensor& t : lists[list]) {
        bytes[list].push_back(t.bytes());
        before[list].emplace_back(t.numel());
        for (int64_t i = 0; i < t.numel(); ++i) before[list].back()[i] = t.get(i);
      }
    }
  }

  fusedaccum::cuda::Update update(const std::vector<double>& hyper, bool zero) const {
    return {scalars.data(), steps.data(), groups.data(), hyper.data(), random.empty() ? nullptr : random.data(), zero};
  }

  void unchanged(Checks& checks, int list, int64_t k) const {
    checks.same(lists[list][k], bytes[list][k], "list that is not written", k);
  }

  // Checks what does not depend on the rule. True where the segment must have been updated.
  bool expect_update(Checks& checks, int64_t k) const {
    const bool updated = window.counts(k) && scalars[1] == 0;
    for (int list = 0; !updated && list < kLists; ++list) unchanged(checks, list, k);
    return updated;
  }

  void expect_flat(Checks& checks, bool zero) const {
    checks.flat(window, flat_before,
                [&](int64_t k, int64_t, float old) { return zero && window.counts(k) ? 0.0f : old; });
  }

  // The value in list, that is `right` but for `bound` before it is rounded to its dtype.
  void expect(Checks& checks, int list, const char* name, int64_t k, int64_t i, double right, double bound) const {
    const Tensor& t = lists[list][k];
    checks.near(t.get(i), right, bound + spacing(std::fabs(right) + bound, t.dtype()) * 0.5, name, k, i);
  }

  // The new p: in the master where there is one, whose rounding the parameter then is.
  void expect_param(Checks& checks, int master, int64_t k, int64_t i, double right, double bound) const {
    const Tensor &param = lists[0][k], &single = lists[master][k];
    if (single.absent() && !random.empty() && param.dtype() == kBF16)  // either neighbour
      return checks.near(param.get(i), right, bound + spacing(std::fabs(right) + bound, kBF16), "params", k, i);
    if (single.absent()) return expect(checks, 0, "params", k, i, right, bound);
    expect(checks, master, "masters", k, i, right, bound);
    checks.equal(param.get(i), rounded(single.get(i), param.dtype()), "params", k, i);
  }
};

// The bounds count roundings: each errs by kUlp of what it rounds.
void expect_adam(Checks& checks, const Step& s, int64_t k, int64_t i) {
  const double* h = &kAdamHyper[s.groups[k] * 8];
  const double lr = h[0], beta1 = h[1], beta2 = h[2], eps = h[3], decay = h[4], step = s.steps[k];
  const bool decoupled = h[5] != 0, has_master = !s.lists[4][k].absent();
  const bool amsgrad = h[6] != 0 && !s.lists[3][k].absent();
  double p = s.before[has_master ? 4 : 0][k][i];
  double g = double(s.flat_before[s.window.offset[k] + i]) * s.scalars[0] * (h[7] != 0 ? -1 : 1);
  double g_bound = kUlp * std::fabs(g);
  const double p_before = std::fabs(p);
  if (decoupled) {
    p -= lr * decay * p;
  } else {
    g_bound += kUlp * (2 * decay * p_before + std::fabs(g));
    g += decay * p;
  }
  const double m_old = s.before[1][k][i], v_old = s.before[2][k][i];
  const double m = m_old + (1 - beta1) * (g - m_old);
  const double m_bound = 2 * g_bound + 3 * kUlp * (std::fabs(g) + std::fabs(m_old));
  const double v = beta2 * v_old + (1 - beta2) * g * g;
  const double v_bound = (1 - beta2) * 2 * std::fabs(g) * g_bound + 5 * kUlp * v;
  const double v_hat = amsgrad ? std::max(s.before[3][k][i], v) : v;
  const double root = std::sqrt(1 - std::pow(beta2, step)), size = lr / (1 - std::pow(beta1, step));
  const double denominator = std::sqrt(v_hat) / root + eps;
  const double update = size * m / denominator;
  const double bound = size * m_bound / denominator + std::fabs(update) * (v_bound / v_hat + 8 * kUlp);
  s.expect_param(checks, 4, k, i, p - update, bound + 3 * kUlp * (p_before + std::fabs(update)));
  s.expect(checks, 1, "exp_avgs", k, i, m, m_bound);
  s.expect(checks, 2, "exp_avg_sqs", k, i, v, v_bound);
  if (amsgrad) s.expect(checks, 3, "max_exp_avg_sqs", k, i, v_hat, v_bound);
}

Step make_adam(Window& w, Random& random, bool any_mix, float skip) {
  Step s(w, random, skip);
  for (int64_t k = 0; k < w.count(); ++k) {
    const Mix mix = mix_of(k, any_mix, random);
    s.add(0, k, mix.param, random, -2, 2);
    s.add(1, k, mix.exp_avg, random, -1, 1);
    s.add(2, k, mix.exp_avg_sq, random, 0.01, 1);
    if (mix.max_exp_avg_sq) s.add(3, k, random() % 2 ? mix.exp_avg_sq : kF32, random, 0.3, 0.6);
    if (mix.master) s.add(4, k, kF32, random, -2, 2);
  }
  s.remember();
  return s;
}

void run_adam(const Device& device, const Step& s, bool zero) {
  const Elements* lists[5];
  for (int list = 0; list < 5; ++list) lists[list] = s.elements[list].data();
  fusedaccum::cuda::adam(device, s.window.buffer(), s.update(kAdamHyper, zero), lists);
}

Step make_sgd(Window& w, Random& random, float skip) {
  Step s(w, random, skip);
  for (int64_t k = 0; k < w.count(); ++k) {
    const DType param = kDTypes[k % 3], buffer = kDTypes[k / 3 % 3];
    s.add(0, k, param, random, -2, 2);
    if (k % 5 != 4) s.add(1, k, k % 4 ? param : buffer, random, -1, 1);
    if (param != kF32 && random() % 2) s.add(2, k, kF32, random, -2, 2);
  }
  s.remember();
  return s;
}

void run_sgd(const Device& device, const Step& s, bool zero) {
  const Elements* const lists[3] = {s.elements[0].data(), s.elements[1].data(), s.elements[2].data()};
  fusedaccum::cuda::sgd(device, s.window.buffer(), s.update(kSgdHyper, zero), lists);
}

void expect_sgd(Checks& checks, const Step& s, int64_t k, int64_t i) {
  const double* h = &kSgdHyper[s.groups[k] * 6];
  const double lr = h[0], momentum = h[1], dampening = h[2], decay = h[3];
  const double p = s.before[s.lists[2][k].absent() ? 0 : 2][k][i];
  const double flat = double(s.flat_before[s.window.offset[k] + i]) * s.scalars[0] * (h[5] != 0 ? -1 : 1);
  double g = flat + decay * p, size = std::fabs(flat) + decay * std::fabs(p);
  if (momentum != 0 && !s.lists[1][k].absent()) {
    const double b_old = s.before[1][k][i];
    const double b = s.steps[k] == 1 ? g : momentum * b_old + (1 - dampening) * g;
    size += std::fabs(b_old);
    s.expect(checks, 1, "momentum_buffers", k, i, b, 6 * kUlp * size);
    g = h[4] != 0 ? g + momentum * b : b;
    size *= 2;
  } else if (i == 0) {
    s.unchanged(checks, 1, k);
  }
  s.expect_param(checks, 2, k, i, p - lr * g, kUlp * (10 * lr * size + 2 * std::fabs(p)));
}

}  // namespace

void check_adam(Checks& checks, const Device& device, Window& w, Random& random, bool any_mix, bool zero,
                bool stochastic) {
  checks.op = any_mix ? "adam, any mixture" : "adam, common mixtures";
  Step s = make_adam(w, random, any_mix, 0);
  if (stochastic) s.round_stochastically();
  run_adam(device, s, zero);
  s.expect_flat(checks, zero);
  for (int64_t k = 0; k < w.count(); ++k) {
    if (!s.expect_update(checks, k)) continue;
    for (int64_t i = 0; i < w.numel[k]; ++i) expect_adam(checks, s, k, i);
    if (kAdamHyper[s.groups[k] * 8 + 6] == 0) s.unchanged(checks, 3, k);
  }
}

void check_sgd(Checks& checks, const Device& device, Window& w, Random& random, bool zero, bool stochastic) {
  checks.op = "sgd";
  Step s = make_sgd(w, random, 0);
  if (stochastic) s.round_stochastically();
  run_sgd(device, s, zero);
  s.expect_flat(checks, zero);
  for (int64_t k = 0; k < w.count(); ++k)
    if (s.expect_update(checks, k))
      for (int64_t i = 0; i < w.numel[k]; ++i) expect_sgd(checks, s, k, i);
}

// A window that the device found to be skipped: nothing but the zeroing is written.
void check_skip(Checks& checks, const Device& device, Window& w, Random& random, bool zero) {
  checks.op = "adam, skipped";
  const Step adam = make_adam(w, random, true, 1);
  run_adam(device, adam, zero);
  adam.expect_flat(checks, zero);
  for (int64_t k = 0; k < w.count(); ++k) adam.expect_update(checks, k);
  checks.op = "sgd, skipped";
  const Step sgd = make_sgd(w, random, 1);
  run_sgd(device, sgd, zero);
  sgd.expect_flat(checks, zero);
  for (int64_t k = 0; k < w.count(); ++k) sgd.expect_update(checks, k);
}

}  // namespace driver
