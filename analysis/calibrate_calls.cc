#include "analysis/calibrate_calls.h"

#include <array>
#include <cmath>
#include <map>
#include <tuple>

#include "analysis/kernel_prices.h"
#include "core/error.h"
#include "core/ranges.h"
#include "simulator/costs/kernels.h"

namespace shardwright {
namespace {

// All calls of one shape.
struct Shape {
  TimedCall call;  // its time is the median
  std::vector<Kernel> kernels;
  std::size_t count = 0;
  Seconds total;
  bool is_held = false;  // of the half that judges
};

using Shapes = std::vector<Shape>;

double Median(std::vector<double> values) {
  const std::size_t middle = values.size() / 2;
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(middle),
                   values.end());
  return values[middle];
}

// As a line of a table of kernel times.
KernelRow RowOf(const TimedCall& call) {
  KernelRow row;
  row.dtype = call.dtype == DType::kBf16 ? "bf16" : call.dtype == DType::kFp16 ? "fp16" : "fp32";
  row.batch = call.batch;
  switch (call.kind) {
    case TimedCallKind::kProduct:
      row.op = "gemm";
      row.m = call.m;
      row.n = call.n;
      row.k = call.k;
      break;
    case TimedCallKind::kAttentionForward:
    case TimedCallKind::kAttentionBackward:
      row.op = "attention";
      row.stack = call.is_cudnn ? "cudnn" : "flash-attention-2";
      row.direction = call.kind == TimedCallKind::kAttentionForward ? "forward" : "backward";
      row.sequence = call.m;
      row.kv_sequence = call.n;
      row.heads = call.heads;
      row.kv_heads = call.kv_heads;
      row.head_dim = call.k;
      row.causal = call.causal;
      break;
    case TimedCallKind::kLayerNormForward:
    case TimedCallKind::kLayerNormBackward:
    case TimedCallKind::kRmsNormForward:
    case TimedCallKind::kRmsNormBackward: {
      const bool is_layer = call.kind == TimedCallKind::kLayerNormForward ||
                            call.kind == TimedCallKind::kLayerNormBackward;
      const bool is_forward = call.kind == TimedCallKind::kLayerNormForward ||
                              call.kind == TimedCallKind::kRmsNormForward;
      row.op = is_layer ? "layer_norm" : "rms_norm";
      row.direction = is_forward ? "forward" : "backward";
      row.rows = call.m;
      row.features = call.n;
      break;
    }
    case TimedCallKind::kElementwise:
    case TimedCallKind::kCopy:
      break;
  }
  return row;
}

std::vector<Kernel> KernelsOf(const TimedCall& call) {
  if (call.kind != TimedCallKind::kElementwise && call.kind != TimedCallKind::kCopy) {
    return KernelsOfRow(RowOf(call));
  }
  Kernel kernel;
  kernel.kind = call.kind == TimedCallKind::kCopy ? KernelClass::kCopy : KernelClass::kElementwise;
  kernel.dtype = call.dtype;
  kernel.read = call.read;
  kernel.written = call.written;
  return {kernel};
}

auto KeyOf(const TimedCall& call) {
  return std::tuple(call.kind, call.dtype, call.is_cudnn, call.causal, call.batch, call.m, call.n,
                    call.k, call.heads, call.kv_heads, call.read, call.written);
}

// Shapes in the order of their sizes; every second one of a kind judges.
Shapes ShapesOf(const std::vector<TimedCalls>& traces) {
  std::map<decltype(KeyOf(TimedCall())), std::vector<double>> times;
  std::map<decltype(KeyOf(TimedCall())), TimedCall> calls;
  for (const TimedCalls& trace : traces) {
    for (const TimedCall& call : trace.calls) {
      times[KeyOf(call)].push_back(call.time.value);
      calls.emplace(KeyOf(call), call);
    }
  }
  Shapes shapes;
  std::map<std::tuple<TimedCallKind, DType, bool>, std::size_t> of_kind;
  for (const auto& [key, call] : calls) {
    Shape shape{call, KernelsOf(call), times[key].size(), {}, false};
    if (shape.kernels.empty()) {
      continue;
    }
    for (const double time : times[key]) {
      shape.total += Seconds(time);
    }
    shape.call.time = Seconds(Median(times[key]));
    shape.is_held = of_kind[{call.kind, call.dtype, call.is_cudnn}]++ % 2 == 1;
    shapes.push_back(std::move(shape));
  }
  return shapes;
}

// Price over measured time.
double RatioOf(const Shape& shape, const KernelRates& rates) {
  const Seconds price = Summed<Seconds>(
      shape.kernels, [&](const Kernel& kernel) { return KernelTime(kernel, rates); });
  return price.value / shape.call.time.value;
}

double MedianError(const std::vector<const Shape*>& shapes, const GpuSpec& gpu,
                   const Profile& profile) {
  const KernelRates rates = FindKernelRates(gpu, profile.compute);
  std::vector<double> errors = Mapped<double>(
      shapes, [&](const Shape* shape) { return std::abs(RatioOf(*shape, rates) - 1); });
  return Median(std::move(errors));
}

struct NumberRule {
  std::string field;  // as in profile files
  bool (*is_told)(const TimedCall&);
  // One that is as another number gets that one's value, so that it can be moved.
  Number<double>& (*number)(ComputeProfile&);
};

template <TimedCallKind kKind, bool kIsCudnn>
bool IsAttention(const TimedCall& call) {
  return call.kind == kKind && call.is_cudnn == kIsCudnn;
}

template <DType kDtype>
NumberRule RuleOfProducts(const std::string& name) {
  return {"compute.gemm." + name,
          [](const TimedCall& c) { return c.kind == TimedCallKind::kProduct && c.dtype == kDtype; },
          [](ComputeProfile& c) -> Number<double>& {
            return *c.gemm[static_cast<std::size_t>(MathTypeOf(kDtype))];
          }};
}

AttentionProfile& OwnCudnn(ComputeProfile& compute) {
  if (compute.cudnn_attention.forward.value == 0) {
    compute.cudnn_attention = compute.attention;
  }
  return compute.cudnn_attention;
}

Number<double>& OwnCopies(ComputeProfile& compute) {
  if (compute.copies.value == 0) {
    compute.copies = compute.elementwise;
  }
  return compute.copies;
}

// Memory first: the others are never faster than their bytes.
const std::array<NumberRule, 10>& Rules() {
  using C = ComputeProfile;
  using N = Number<double>;
  constexpr TimedCallKind kForward = TimedCallKind::kAttentionForward;
  constexpr TimedCallKind kBackward = TimedCallKind::kAttentionBackward;
  static const std::array<NumberRule, 10> rules = {{
      {"compute.elementwise",
       [](const TimedCall& c) { return c.kind == TimedCallKind::kElementwise; },
       [](C& c) -> N& { return c.elementwise; }},
      {"compute.copies", [](const TimedCall& c) { return c.kind == TimedCallKind::kCopy; },
       OwnCopies},
      {"compute.reduction",
       [](const TimedCall& c) {
         return c.kind >= TimedCallKind::kLayerNormForward &&
                c.kind <= TimedCallKind::kRmsNormBackward;
       },
       [](C& c) -> N& { return c.reduction; }},
      RuleOfProducts<DType::kBf16>("bf16"),
      RuleOfProducts<DType::kFp16>("fp16"),
      RuleOfProducts<DType::kFp32>("fp32"),
      {"compute.attention_forward", IsAttention<kForward, false>,
       [](C& c) -> N& { return c.attention.forward; }},
      {"compute.attention_backward", IsAttention<kBackward, false>,
       [](C& c) -> N& { return c.attention.backward; }},
      {"compute.cudnn_attention_forward", IsAttention<kForward, true>,
       [](C& c) -> N& { return OwnCudnn(c).forward; }},
      {"compute.cudnn_attention_backward", IsAttention<kBackward, true>,
       [](C& c) -> N& { return OwnCudnn(c).backward; }},
  }};
  return rules;
}

class Fit {
 public:
  Fit(const GpuSpec& gpu, const NumberRule& rule, Profile& profile)
      : gpu_(gpu), profile_(profile), number_(rule.number(profile.compute)) {
    result_.field = rule.field;
    result_.before = result_.after = number_.value;
  }

  // Nothing where no price depends on the number.
  void Run(const Shapes& shapes, const NumberRule& rule, const Origin& origin,
           std::vector<CallNumber>& numbers) {
    for (const Shape& shape : shapes) {
      if (rule.is_told(shape.call) && Depends(shape)) {
        (shape.is_held ? held_ : fitted_).push_back(&shape);
      }
    }
    if (fitted_.empty()) {
      return;
    }
    const std::vector<const Shape*>& judges = held_.empty() ? fitted_ : held_;
    result_.fitted = fitted_.size();
    result_.held = held_.size();
    result_.error_before = MedianError(judges, gpu_, profile_);
    result_.after = Solve();
    number_.value = result_.after;
    result_.error_after = MedianError(judges, gpu_, profile_);
    // At the least value the calls are slower than a fraction can say: they waited for something.
    result_.is_kept =
        result_.error_after <= result_.error_before + kTolerance && result_.after > 1.01 * kLeast;
    if (result_.is_kept) {
      number_.origin = origin;
      number_.spread = result_.error_after;
    } else {
      number_.value = result_.before;
    }
    numbers.push_back(result_);
  }

 private:
  static constexpr double kTolerance = 0.002;
  static constexpr double kLeast = 0.01;  // fractions of a peak

  double RatioAt(const Shape& shape, double value) {
    const double old = number_.value;
    number_.value = value;
    const double ratio = RatioOf(shape, FindKernelRates(gpu_, profile_.compute));
    number_.value = old;
    return ratio;
  }

  // Does the price of a shape come from this number? Half of it must make the shape take at least
  // 1.6 times as long, or something else is what it waits for; and what a cache may keep from one
  // kernel to the next says nothing of memory.
  bool Depends(const Shape& shape) {
    Bytes bytes;
    Flops flops;
    for (const Kernel& kernel : shape.kernels) {
      bytes += kernel.read + kernel.written;
      flops += kernel.flops;
    }
    const Bytes cache = FindKernelRates(gpu_, profile_.compute).cache;
    if (flops.value == 0 && bytes <= 2 * cache) {
      return false;
    }
    constexpr double kFelt = 1.6;
    return RatioAt(shape, result_.before / 2) > kFelt * RatioAt(shape, result_.before);
  }

  // Where the median of the first half's ratios is 1; it falls while the number rises.
  double Solve() {
    const auto median = [&](double value) {
      std::vector<double> ratios =
          Mapped<double>(fitted_, [&](const Shape* shape) { return RatioAt(*shape, value); });
      return Median(std::move(ratios));
    };
    double low = kLeast, high = 1.0;
    constexpr int kHalvings = 40;
    for (int i = 0; i < kHalvings; ++i) {
      const double middle = std::sqrt(low * high);
      (median(middle) > 1 ? low : high) = middle;
    }
    return std::sqrt(low * high);
  }

  const GpuSpec& gpu_;
  Profile& profile_;
  Number<double>& number_;
  CallNumber result_;
  std::vector<const Shape*> fitted_, held_;
};

std::string KindOf(const TimedCall& call) {
  const char* const dtype = call.dtype == DType::kBf16   ? " in bf16"
                            : call.dtype == DType::kFp16 ? " in fp16"
                                                         : " in fp32";
  const std::string library = call.is_cudnn ? ", cuDNN" : "";
  switch (call.kind) {
    case TimedCallKind::kProduct:
      return std::string("products") + dtype;
    case TimedCallKind::kAttentionForward:
      return "attention, forward" + library;
    case TimedCallKind::kAttentionBackward:
      return "attention, backward" + library;
    case TimedCallKind::kElementwise:
      return "element-wise";
    case TimedCallKind::kCopy:
      return "copies and casts";
    default:
      return "norms";
  }
}

std::vector<CallCoverage> CoverageOf(const Shapes& shapes, const GpuSpec& gpu,
                                     const Profile& before, const Profile& after) {
  std::map<std::string, std::vector<const Shape*>> kinds;
  for (const Shape& shape : shapes) {
    kinds[KindOf(shape.call)].push_back(&shape);
  }
  std::vector<CallCoverage> rows;
  for (const auto& [kind, of_kind] : kinds) {
    CallCoverage row{kind, 0, of_kind.size(), {}, 0, 0};
    for (const Shape* shape : of_kind) {
      row.calls += shape->count;
      row.time += shape->total;
    }
    row.error_before = MedianError(of_kind, gpu, before);
    row.error_after = MedianError(of_kind, gpu, after);
    rows.push_back(std::move(row));
  }
  StableSortBy(rows, &CallCoverage::time, std::greater<>());
  return rows;
}

}  // namespace

CallCalibration CalibrateCalls(const std::vector<TimedCalls>& calls, const GpuSpec& gpu,
                               const Profile& start, const Origin& origin) {
  // A GPU without a unit for a dtype has no price for its products.
  Shapes shapes = ShapesOf(calls);
  std::erase_if(shapes, [&](const Shape& shape) {
    return !start.compute.gemm[static_cast<std::size_t>(MathTypeOf(shape.call.dtype))];
  });
  if (shapes.empty()) {
    throw InputError(calls.front().file, "no call with a shape that is known",
                     "a trace of PyTorch's profiler with record_shapes=True");
  }
  CallCalibration result;
  result.profile = start;
  for (const NumberRule& rule : Rules()) {
    if (AnyOf(shapes, [&](const Shape& shape) { return rule.is_told(shape.call); })) {
      Profile moved = result.profile;
      const std::size_t known = result.numbers.size();
      Fit(gpu, rule, moved).Run(shapes, rule, origin, result.numbers);
      if (result.numbers.size() > known && result.numbers.back().is_kept) {
        result.profile = std::move(moved);
      }
    }
  }
  result.coverage = CoverageOf(shapes, gpu, start, result.profile);
  std::map<std::string, Seconds> untold;
  for (const TimedCalls& trace : calls) {
    result.total += trace.total;
    for (const auto& [name, time] : trace.untold) {
      untold[name] += time;
    }
  }
  result.untold.assign(untold.begin(), untold.end());
  StableSort(result.untold, [](const auto& a, const auto& b) { return a.second > b.second; });
  return result;
}

}  // namespace shardwright
