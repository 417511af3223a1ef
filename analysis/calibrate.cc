#include "analysis/calibrate.h"

#include <cmath>
#include <limits>
#include <span>
#include <utility>

#include "analysis/piecewise_fit.h"
#include "core/error.h"
#include "core/ranges.h"
#include "models/kernels/cuda.h"
#include "simulator/costs/kernels.h"
#include "simulator/simulate.h"
#include "topologies/routing.h"

namespace shardwright {
namespace {

// A number of the profile as the fit sees it: a time as it is, a fraction as 1 / fraction, in which
// prices are linear.
struct Field {
  std::string name;
  Number<double>* fraction = nullptr;
  Number<Seconds>* time = nullptr;
  bool is_fixed = false;  // prices use it and the fit leaves it alone
};

constexpr double kUsualTime = 1e-6;

FitColumn ColumnOf(const Field& field) {
  if (field.time != nullptr) {
    return {field.time->value.value, std::max(field.time->value.value, kUsualTime), 0,
            field.is_fixed};
  }
  // Profiles refuse fractions above 1.
  const double inverse = 1 / field.fraction->value;
  return {inverse, inverse, 1, field.is_fixed};
}

// Rounded to what a measurement can mean, so that files stay readable.
double Rounded(double value) {
  constexpr double kDigits = 1e6;
  if (value == 0) {
    return 0;
  }
  const double scale = std::pow(10.0, std::floor(std::log10(std::abs(value)))) / kDigits;
  return std::round(value / scale) * scale;
}

void Store(const Field& field, const FittedValue& found, const Origin& origin,
           std::vector<CalibratedNumber>& numbers) {
  if (!found.is_found) {
    return;
  }
  CalibratedNumber number{field.name, field.time != nullptr, 0, 0, found.spread, found.rows};
  const double spread = std::round(found.spread * 1e4) / 1e4;
  if (field.time != nullptr) {
    number.before = field.time->value.value;
    number.after = Rounded(found.value);
    *field.time = {Seconds(number.after), origin, spread};
  } else {
    number.before = field.fraction->value;
    number.after = std::min(1.0, Rounded(1 / found.value));
    *field.fraction = {number.after, origin, spread};
  }
  numbers.push_back(std::move(number));
}

void FitFields(const std::vector<Field>& fields, const RowsAt& rows_at, const Origin& origin,
               std::vector<CalibratedNumber>& numbers, bool keeps_sums = false) {
  std::vector<FitColumn> columns =
      Mapped<FitColumn>(fields, [&](const Field& field) { return ColumnOf(field); });
  std::vector<FittedValue> found = FitPiecewise(columns, rows_at);
  if (keeps_sums) {
    KeepSums(columns, rows_at, found);
  }
  for (std::size_t i = 0; i < fields.size(); ++i) {
    Store(fields[i], found[i], origin, numbers);
  }
}

// An op that takes most of the step decides most about its time.
double WeightOf(const ShapeSample& sample, double measured) {
  return static_cast<double>(sample.ops) * measured;
}

// Columns of the kernels' fit.
enum KernelColumn : std::size_t {
  kAttentionForwardColumn = kMathTypeCount,
  kAttentionBackwardColumn,
  kOwnAttentionForwardColumn,
  kOwnAttentionBackwardColumn,
  kOwnGroupedColumn,
  kElementwiseColumn,
  kReductionColumn,
  kOptimizerColumn,
  kGradNormColumn,
  kGradClipColumn,
  kCopiesColumn,
  kRowsColumn,
  kGatherColumn,
  kLoadColumn,
  kOperandsColumn,
  kRampColumn,
  kFloorColumn,
  kGapColumn,
  kKernelFields,
};

// Whose fused attention the samples ran beside the executor's own, by the first of them.
AttentionImpl AttentionIn(const std::vector<CalibrationRun>& runs,
                          const CalibrationSamples& samples) {
  for (const ShapeSample& sample : samples.shapes) {
    const Program& program = runs[sample.run].program;
    for (const Kernel& kernel : program.KernelsOf(program.shapes[sample.shape.value])) {
      if (IsAttention(kernel.kind) && kernel.attention != AttentionImpl::kOwn) {
        return kernel.attention;
      }
    }
  }
  return AttentionImpl::kFlash;
}

std::vector<Field> KernelFields(ComputeProfile& compute, AttentionImpl library) {
  AttentionProfile& attention = AttentionOf(compute, library);
  const std::string prefix = &attention == &compute.cudnn_attention    ? "compute.cudnn_"
                             : &attention == &compute.flash3_attention ? "compute.flash3_"
                             : &attention == &compute.triton_attention ? "compute.triton_"
                             : &attention == &compute.ck_attention     ? "compute.ck_"
                                                                       : "compute.";
  std::vector<Field> fields(kKernelFields);
  for (std::size_t i = 0; i < kMathTypeCount; ++i) {
    fields[i].name = std::string("compute.gemm.") + MathTypeName(static_cast<MathType>(i));
    fields[i].fraction = compute.gemm[i] ? &*compute.gemm[i] : nullptr;
  }
  fields[kAttentionForwardColumn] = {prefix + "attention_forward", &attention.forward};
  fields[kAttentionBackwardColumn] = {prefix + "attention_backward", &attention.backward};
  AttentionProfile& own = compute.own_attention;
  const bool has_own = own.forward.value > 0;
  fields[kOwnAttentionForwardColumn] = {"compute.own_attention_forward",
                                        has_own ? &own.forward : nullptr};
  fields[kOwnAttentionBackwardColumn] = {"compute.own_attention_backward",
                                         has_own ? &own.backward : nullptr};
  fields[kOwnGroupedColumn] = {"compute.own_grouped",
                               compute.own_grouped.value > 0 ? &compute.own_grouped : nullptr};
  fields[kElementwiseColumn] = {"compute.elementwise", &compute.elementwise};
  fields[kReductionColumn] = {"compute.reduction", &compute.reduction};
  fields[kOptimizerColumn] = {"compute.optimizer", &compute.optimizer};
  fields[kGradNormColumn] = {"compute.grad_norm", &compute.grad_norm};
  fields[kGradClipColumn] = {"compute.grad_clip", &compute.grad_clip};
  fields[kCopiesColumn] = {"compute.copies", &compute.copies};
  fields[kRowsColumn] = {"compute.rows", compute.rows.value > 0 ? &compute.rows : nullptr};
  fields[kGatherColumn] = {"compute.gather", compute.gather.value > 0 ? &compute.gather : nullptr};
  fields[kLoadColumn] = {"compute.load", nullptr,
                         compute.load.value.value > 0 ? &compute.load : nullptr};
  fields[kOperandsColumn] = {"compute.gemm_operands",
                             compute.gemm_operands.value > 0 ? &compute.gemm_operands : nullptr};
  fields[kRampColumn] = {"compute.gemm_ramp", nullptr, &compute.gemm_ramp};
  fields[kFloorColumn] = {"compute.kernel_floor", nullptr, &compute.kernel_floor};
  fields[kGapColumn] = {"compute.kernel_gap", nullptr, &compute.kernel_gap};
  return fields;
}

// The formulas of KernelTime (simulator/costs/kernels.cc) as terms: which of two counts is decided
// with the present values.
class KernelTerms {
 public:
  KernelTerms(const GpuSpec& gpu, const ComputeProfile& compute, std::span<const double> values,
              OpCode code = OpCode::kOptimizerStep)
      : gpu_(gpu),
        compute_(compute),
        values_(values),
        update_column_(code == OpCode::kGradNorm   ? kGradNormColumn
                       : code == OpCode::kGradClip ? kGradClipColumn
                                                   : kOptimizerColumn) {}

  void Add(const Kernel& kernel, std::vector<FitTerm>& terms) const {
    std::vector<FitTerm> own = Busy(kernel);
    if (kernel.kind == KernelClass::kGemm || kernel.kind == KernelClass::kGroupedGemm ||
        kernel.kind == KernelClass::kConv) {
      own.push_back({kRampColumn, 1});
    }
    const double time = Summed<double>(
        own, [&](const FitTerm& term) { return term.factor * values_[term.column]; });
    if (time < values_[kFloorColumn]) {
      own = {{kFloorColumn, 1}};
    }
    own.push_back({kGapColumn, 1});
    terms.insert(terms.end(), own.begin(), own.end());
  }

  void AddCopy(Bytes bytes, std::vector<FitTerm>& terms) const {
    Kernel copy;
    copy.kind = KernelClass::kCopy;
    copy.read = copy.written = bytes;
    Add(copy, terms);
  }

 private:
  [[nodiscard]] std::vector<FitTerm> Busy(const Kernel& kernel) const {
    const Bytes bytes = kernel.read + kernel.written;
    const double traffic = (bytes / gpu_.memory_bandwidth.value).value;
    const FitTerm streaming{kElementwiseColumn, traffic};
    const std::int64_t sm_count = std::max<std::int64_t>(gpu_.sm_count.value, 1);
    switch (kernel.kind) {
      case KernelClass::kGemm:
      case KernelClass::kGroupedGemm:
      case KernelClass::kConv: {
        const MathType type = TypeFor(kernel.dtype, true);
        const bool is_grouped = kernel.kind == KernelClass::kGroupedGemm && sm_count > 1;
        const double overhead = is_grouped
                                    ? PaddingOverhead(kernel.m, kernel.n)
                                    : TileOverhead(kernel.batch, kernel.m, kernel.n, sm_count);
        const bool is_own = kernel.is_own && IsOwnGroupedKnown(compute_, type);
        const FitTerm multiplying{is_own ? kOwnGroupedColumn : static_cast<std::size_t>(type),
                                  overhead * AtPeak(kernel, type)};
        if (is_grouped) {
          const FitTerm longer = Larger(multiplying, streaming);
          FitTerm shorter = longer.column == multiplying.column ? streaming : multiplying;
          shorter.factor *= 1 - compute_.grouped_overlap.value;
          return {longer, shorter};
        }
        if (compute_.gemm_operands.value > 0) {
          return {multiplying, {kOperandsColumn, traffic}};
        }
        return {Larger(multiplying, streaming)};
      }
      case KernelClass::kAttentionForward:
      case KernelClass::kAttentionBackward: {
        const bool is_forward = kernel.kind == KernelClass::kAttentionForward;
        const AttentionImpl attention_on_gpu =
            AttentionOn(kernel, HasWideCudnnGradients(gpu_.architecture));
        const bool is_own =
            attention_on_gpu == AttentionImpl::kOwn && compute_.own_attention.forward.value > 0;
        const std::size_t column =
            is_own ? (is_forward ? kOwnAttentionForwardColumn : kOwnAttentionBackwardColumn)
                   : (is_forward ? kAttentionForwardColumn : kAttentionBackwardColumn);
        const AttentionProfile& attention = AttentionOf(compute_, attention_on_gpu);
        const double overhead =
            AttentionOverhead(kernel, attention.softmax.value, attention.start.value, sm_count,
                              attention.group.value);
        return {
            Larger({column, overhead * AtPeak(kernel, TypeFor(kernel.dtype, false))}, streaming)};
      }
      case KernelClass::kSoftmax:
        if (kernel.row > Bytes(0)) {
          const Bytes all = RowTraffic(kernel, gpu_.l2.value, sm_count);
          return {{compute_.rows.value > 0 ? kRowsColumn : kElementwiseColumn,
                   (all / gpu_.memory_bandwidth.value).value}};
        }
        return {{kReductionColumn, traffic}};
      case KernelClass::kNorm:
        return {{kReductionColumn, traffic}};
      case KernelClass::kGatherScatter: {
        const FitTerm moving{compute_.gather.value > 0 ? kGatherColumn : kElementwiseColumn,
                             traffic};
        const bool waits = kernel.waits > 0 && compute_.load.value.value > 0;
        return {waits ? Larger(moving, {kLoadColumn, static_cast<double>(kernel.waits)}) : moving};
      }
      case KernelClass::kOptimizer:
        return {{update_column_, traffic}};
      case KernelClass::kCopy:
        return {{kCopiesColumn, traffic}};
      case KernelClass::kElementwise:
      case KernelClass::kQr:  // not part of recordings
        break;
    }
    return {streaming};
  }

  [[nodiscard]] FitTerm Larger(const FitTerm& a, const FitTerm& b) const {
    return a.factor * values_[a.column] >= b.factor * values_[b.column] ? a : b;
  }

  // What the matrix units cannot do, or the profile has no number for, runs as fp32.
  [[nodiscard]] MathType TypeFor(DType dtype, bool is_gemm) const {
    const MathType type = MathTypeOf(dtype);
    const bool has_fraction = !is_gemm || compute_.gemm[static_cast<std::size_t>(type)].has_value();
    return PeakFlops(gpu_, type).has_value() && has_fraction ? type : MathType::kFp32;
  }

  [[nodiscard]] double AtPeak(const Kernel& kernel, MathType type) const {
    const std::optional<FlopsPerSecond> peak = PeakFlops(gpu_, type);
    if (!peak || (type == MathType::kFp32 && !compute_.gemm[0])) {
      throw InputError("profile: compute.gemm", "no rate for fp32",
                       "a fraction of the peak for every type that the model multiplies");
    }
    return (kernel.flops / *peak).value;
  }

  const GpuSpec& gpu_;
  const ComputeProfile& compute_;
  std::span<const double> values_;
  std::size_t update_column_;
};

// Where the fit begins for a number that the profile does not have.
void StartLike(const Number<double>& usual, Number<double>& fraction) {
  if (fraction.value == 0) {
    fraction = usual;
  }
}

bool AreOnCores(const std::vector<CalibrationRun>& runs) {
  return AllOf(runs, [](const CalibrationRun& run) { return run.cluster.SharedCores() > 0; });
}

// Whether products have so many and so few operations per byte that their operands' time can be
// told from that of multiplying.
bool TellOperands(const std::vector<CalibrationRun>& runs, const CalibrationSamples& samples) {
  constexpr double kRange = 4;
  double least = std::numeric_limits<double>::infinity();
  double most = 0;
  for (const ShapeSample& sample : samples.shapes) {
    const Program& program = runs[sample.run].program;
    for (const Kernel& kernel : program.KernelsOf(program.shapes[sample.shape.value])) {
      if (kernel.kind == KernelClass::kGemm && kernel.flops.value > 0) {
        const Bytes bytes = kernel.read + kernel.written;
        const double per_byte = kernel.flops.value / static_cast<double>(bytes.value);
        least = std::min(least, per_byte);
        most = std::max(most, per_byte);
      }
    }
  }
  return most >= kRange * least;
}

bool IsPricedByKernels(const OpShape& shape) {
  const OpCodeInfo& info = InfoOf(shape.code);
  return !info.is_collective && !info.runs_on_host && shape.code != OpCode::kCopyH2d &&
         shape.code != OpCode::kCopyD2h && shape.code != OpCode::kHostOptimizerStep;
}

void CalibrateWake(const CalibrationSamples& samples, const Origin& origin, HostProfile& host,
                   std::vector<CalibratedNumber>& numbers) {
  if (samples.wakes.empty()) {
    return;
  }
  const double wake = MedianOf(samples.wakes);
  std::vector<double> errors = Mapped<double>(samples.wakes, [&](const double seconds) {
    return wake > 0 ? std::abs(seconds / wake - 1) : 0;
  });
  Store({"host.wake", nullptr, &host.wake},
        {wake, true, MedianOf(std::move(errors)), std::ssize(samples.wakes)}, origin, numbers);
}

// What PyTorch recorded where the host computes went through gloo; nothing else does.
void CalibrateGloo(const std::vector<CalibrationRun>& runs, const Origin& origin, Profile& profile,
                   std::vector<CalibratedNumber>& numbers) {
  const bool is_gloo = AnyOf(runs, [](const CalibrationRun& run) {
    return run.recordings != nullptr &&
           std::none_of(run.recordings->begin(), run.recordings->end(),
                        [](const ProfilerRecording& recording) { return recording.on_device; });
  });
  Number<double>& number = profile.overlap.gloo;
  const double value = is_gloo ? 1 : 0;
  if (number.value != value) {
    numbers.push_back({"overlap.gloo", false, number.value, value, 0, 0});
    number = {value, origin, 0};
  }
}

bool IsHostCopy(const OpShape& shape) {
  return shape.code == OpCode::kCopyH2d || shape.code == OpCode::kCopyD2h;
}

}  // namespace

void CalibrateKernels(const std::vector<CalibrationRun>& runs, const CalibrationSamples& samples,
                      const Origin& origin, Profile& profile,
                      std::vector<CalibratedNumber>& numbers) {
  const ComputeProfile before = profile.compute;
  StartLike(before.optimizer, profile.compute.grad_norm);
  StartLike(before.optimizer, profile.compute.grad_clip);
  StartLike(before.elementwise, profile.compute.copies);
  const bool on_cores = AreOnCores(runs);
  const bool tell_operands = on_cores && TellOperands(runs, samples);
  if (tell_operands) {
    StartLike(before.optimizer, profile.compute.gemm_operands);
  }
  std::vector<Field> all = KernelFields(profile.compute, AttentionIn(runs, samples));
  all[kOperandsColumn].is_fixed = !tell_operands;
  // Types without a number of their own keep their column, which no term uses.
  Number<double> unused{1, {}, 0};
  std::vector<Field> fields = all;
  for (Field& field : fields) {
    if (field.fraction == nullptr && field.time == nullptr) {
      field.fraction = &unused;
    }
  }
  const RowsAt rows_at = [&](std::span<const double> values) {
    std::vector<FitRow> rows;
    for (const ShapeSample& sample : samples.shapes) {
      const CalibrationRun& run = runs[sample.run];
      const OpShape& shape = run.program.shapes[sample.shape.value];
      if (!IsPricedByKernels(shape) || sample.seconds <= 0) {
        continue;
      }
      FitRow row{{}, sample.seconds, WeightOf(sample, sample.seconds)};
      const KernelTerms terms(run.cluster.gpu, profile.compute, values, shape.code);
      for (const Kernel& kernel : run.program.KernelsOf(shape)) {
        terms.Add(kernel, row.terms);
      }
      if (shape.kernel_count == 0 && shape.bytes.value > 0) {
        terms.AddCopy(shape.bytes, row.terms);
      }
      if (!row.terms.empty()) {
        rows.push_back(std::move(row));
      }
    }
    for (const KernelSample& sample : samples.kernels) {
      FitRow row{{}, sample.seconds, sample.seconds};
      const KernelTerms terms(runs[sample.run].cluster.gpu, profile.compute, values);
      for (const Kernel& kernel : sample.kernels) {
        terms.Add(kernel, row.terms);
      }
      rows.push_back(std::move(row));
    }
    return rows;
  };
  // Ops on cores say what they computed themselves; elsewhere some are slowed by what runs beside
  // them, which the middle op tells from the rest and a sum does not.
  FitFields(fields, rows_at, origin, numbers, on_cores);
  const auto keep_unless_found = [&](const char* field, Number<double>& now,
                                     const Number<double>& old) {
    now = AnyOf(numbers, [&](const auto& n) { return n.field == field; }) ? now : old;
  };
  keep_unless_found("compute.grad_norm", profile.compute.grad_norm, before.grad_norm);
  keep_unless_found("compute.grad_clip", profile.compute.grad_clip, before.grad_clip);
  keep_unless_found("compute.copies", profile.compute.copies, before.copies);
  keep_unless_found("compute.gemm_operands", profile.compute.gemm_operands, before.gemm_operands);
}

void CalibrateHost(const std::vector<CalibrationRun>& runs, const CalibrationSamples& samples,
                   const Origin& origin, Profile& profile, std::vector<CalibratedNumber>& numbers) {
  HostProfile& host = profile.host;
  enum Column : std::size_t { kLaunch, kOp, kCollective, kHook, kCopy };
  const std::vector<Field> fields = {
      {"host.kernel_launch", nullptr, &host.kernel_launch},
      {"host.op_issue", nullptr, &host.op_issue},
      {"host.collective_issue", nullptr, &host.collective_issue},
      {"host.unit_hook", nullptr, &host.unit_hook},
      {"host.copy_issue", nullptr, &host.copy_issue},
  };
  std::vector<FitRow> rows;
  for (const ShapeSample& sample : samples.shapes) {
    const Program& program = runs[sample.run].program;
    const OpShape& shape = program.shapes[sample.shape.value];
    if (sample.issue <= 0 || InfoOf(shape.code).runs_on_host) {
      continue;
    }
    FitRow row{{}, sample.issue, WeightOf(sample, sample.issue)};
    const double launches =
        shape.kernel_count == 0 && shape.bytes.value > 0 ? 1.0 : shape.kernel_count;
    if (InfoOf(shape.code).is_collective) {
      row.terms.push_back({kCollective, 1});
      if (shape.issue == Issue::kHook) {
        row.terms.push_back({kHook, 1});
      }
    } else if (IsHostCopy(shape)) {
      row.terms.push_back({kCopy, 1});
    } else if (IsPricedByKernels(shape) && (launches > 0 || shape.code == OpCode::kCompute)) {
      row.terms = {{kLaunch, launches}, {kOp, 1}};
      if (shape.issue == Issue::kHook) {
        row.terms.push_back({kHook, 2});
      }
    }
    if (!row.terms.empty()) {
      rows.push_back(std::move(row));
    }
  }
  FitFields(
      fields, [&](std::span<const double>) { return rows; }, origin, numbers);
  CalibrateWake(samples, origin, host, numbers);
}

void CalibrateCopies(const std::vector<CalibrationRun>& runs, const CalibrationSamples& samples,
                     const Origin& origin, Profile& profile,
                     std::vector<CalibratedNumber>& numbers) {
  CopyProfile& copy = profile.copy;
  enum Column : std::size_t { kToDevice, kToHost, kLatency };
  const std::vector<Field> fields = {
      {"copy.to_device", &copy.to_device},
      {"copy.to_host", &copy.to_host},
      {"copy.latency", nullptr, &copy.latency},
  };
  std::vector<FitRow> rows;
  for (const ShapeSample& sample : samples.shapes) {
    const CalibrationRun& run = runs[sample.run];
    const OpShape& shape = run.program.shapes[sample.shape.value];
    if (!IsHostCopy(shape) || sample.seconds <= 0) {
      continue;
    }
    const HostCopyRates rates = FindHostCopyRates(run.cluster);
    const bool to_device = shape.code == OpCode::kCopyH2d;
    const double at_link_rate =
        (shape.bytes / (to_device ? rates.to_device_together : rates.to_host_together)).value;
    rows.push_back({{{to_device ? kToDevice : kToHost, at_link_rate}, {kLatency, 1}},
                    sample.seconds,
                    WeightOf(sample, sample.seconds)});
  }
  FitFields(
      fields, [&](std::span<const double>) { return rows; }, origin, numbers);
}

bool CalibrationResult::IsWorse() const {
  double before = 0, after = 0;
  for (const CalibratedRun& run : runs) {
    before += std::abs(run.before.value / run.measured.value - 1);
    after += std::abs(run.after.value / run.measured.value - 1);
  }
  return after - before > kWorseCalibration * static_cast<double>(runs.size());
}

std::string OneSizeNote(std::string_view transport) {
  return "all collectives over " + std::string(transport) +
         " had about one size, so what one costs whatever its size is not told";
}

CalibrationResult Calibrate(const std::vector<CalibrationRun>& runs, const Profile& start,
                            const Origin& origin) {
  SW_CHECK(!runs.empty(), "nothing to calibrate with");
  CalibrationSamples samples = CollectSamples(runs);
  CalibrationResult result;
  result.profile = start;
  CalibrateGloo(runs, origin, result.profile, result.numbers);
  CalibrateSharedWork(runs, samples, origin, result.profile, result.numbers);
  CalibrateBusyCores(runs, samples, origin, result.profile, result.numbers);
  CalibrateKernels(runs, samples, origin, result.profile, result.numbers);
  const std::vector<TransportProfile> others =
      CalibrateCollectives(runs, samples, origin, result.profile, result.numbers);
  CalibrateCopies(runs, samples, origin, result.profile, result.numbers);
  CalibrateHost(runs, samples, origin, result.profile, result.numbers);
  if (!others.empty()) {
    result.other = result.profile;
  }
  for (const TransportProfile& other : others) {
    result.of_one_size.push_back(other.name);
    for (TransportProfile& transport : result.other->transports) {
      transport = transport.name == other.name ? other : transport;
    }
  }
  SimulateOptions options;
  options.reserved = false;
  for (const CalibrationRun& run : runs) {
    if (run.shapes != nullptr) {
      continue;  // no steps
    }
    const auto simulate = [&](const Profile& profile) {
      return ToSeconds(Simulate(run.program, run.cluster, profile, options).step_time);
    };
    result.runs.push_back(
        {run.name, MeasuredStepTime(run), simulate(start), simulate(result.profile)});
  }
  return result;
}

}  // namespace shardwright
