#include "analysis/confidence.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "analysis/bands.h"
#include "analysis/predict_run.h"
#include "core/json.h"
#include "core/printable.h"
#include "core/text.h"
#include "topologies/profile_fit.h"
#include "topologies/profile_targets.h"

namespace shardwright {
namespace {

// The shipped profile with the plan's numbers, but for the network and memory, which no fit to
// steps touched: a user's own log of nccl-tests leaves the kernels as they shipped. Nothing: the
// numbers are the user's.
std::optional<std::string> ShippedProfile(const PlanFile& file) {
  const Profile& profile = file.profile;
  const std::vector<std::string> names = ListProfiles();
  const bool is_named = std::binary_search(names.begin(), names.end(), profile.name);
  const Profile shipped =
      is_named ? LoadProfile(profile.name) : DefaultProfile(file.cluster.gpu, file.kernels.name);
  const bool is_equal = shipped.compute == profile.compute && shipped.host == profile.host &&
                        shipped.copy == profile.copy && shipped.overlap == profile.overlap;
  return is_equal ? std::optional(shipped.name) : std::nullopt;
}

// A card of the catalog, and not one of a user's file that has its name or architecture.
bool IsOfCatalog(const GpuSpec& gpu) {
  const std::vector<GpuSpec>& known = GpuCatalog();
  return std::any_of(known.begin(), known.end(), [&](const GpuSpec& card) {
    return card.name == gpu.name && card.peak_flops == gpu.peak_flops &&
           card.memory_bandwidth == gpu.memory_bandwidth;
  });
}

// Published ones.
std::string Runs(std::int64_t count) {
  return std::to_string(count) + (count == 1 ? " run" : " runs");
}

// What is known of the stack: nothing, or what the profile's numbers come from.
struct Known {
  bool is_own = false;  // the user's profile
  std::optional<ProfileFit> fit;
  bool is_of_catalog = false;  // the GPU
  bool on_this_gpu = false;
};

Known KnownOf(const PlanFile& file) {
  Known known;
  const std::optional<std::string> shipped = ShippedProfile(file);
  known.is_own = !shipped;
  known.fit = shipped ? FitOf(*shipped) : std::nullopt;
  known.is_of_catalog = IsOfCatalog(file.cluster.gpu);
  known.on_this_gpu = known.is_of_catalog && known.fit && known.fit->gpu == file.cluster.gpu.name;
  return known;
}

// Was any shipped profile fitted to steps of which this is true?
template <class Test>
bool HasFit(Test is_true) {
  const std::vector<std::string> names = ListProfiles();
  return std::any_of(names.begin(), names.end(), [&](const std::string& name) {
    const std::optional<ProfileFit> fit = FitOf(name);
    return fit && is_true(*fit);
  });
}

bool KnowsStack(const std::string& kernels) {
  return HasFit([&](const ProfileFit& fit) { return fit.RunCount(kernels) > 0; });
}

// No step is known of ranks that cut layers or tokens, share out experts or have other layers: the
// stack has not seen them.
bool IsOnNewMesh(const PlanFile& file) {
  return file.plan.tensor_size * file.plan.expert_size * file.plan.context_size *
             file.plan.pipeline_size >
         1;
}

std::string TextOf(const PlanFile& file, const Known& known) {
  const std::string& kernels = file.kernels.name;
  const std::string gpu = PrintableLine(file.cluster.gpu.name);
  if (known.is_own) {
    return "profile " + PrintableLine(file.profile.name) + " is your own";
  }
  if (file.profile.architecture.empty()) {
    return "nothing is known of architecture " + PrintableLine(file.cluster.gpu.architecture) +
           ": prices are those of its data sheet";
  }
  if (!known.on_this_gpu) {
    const std::string ours = known.is_of_catalog ? "" : "your own ";
    const std::string text = "no run of " + kernels + " on " + ours + gpu + " is known";
    return known.fit ? text + ", " + Runs(known.fit->RunCount()) + " on " +
                           (known.is_of_catalog ? "" : "the catalog's ") + known.fit->gpu
                     : text;
  }
  const std::int64_t count = known.fit->RunCount(), of_it = known.fit->RunCount(kernels);
  std::string text = Runs(count) + " on " + gpu + (count == 1 ? " is known" : " are known");
  if (of_it == 0) {
    return text + ", " + kernels + " on " +
           (KnowsStack(kernels) ? "other GPUs only" : "none of any GPU");
  }
  return of_it == count ? text : text + ", " + std::to_string(of_it) + " of " + kernels;
}

// Of a normal error with a mean absolute value of 1: the half-width that holds 90 % of it,
// 1.6449 / sqrt(2 / pi).
constexpr double kBandPerMeanError = 2.0616;

// How far the plan is from what steps are known of; cards that add at half rate are chips of their
// own, of which no step is known.
std::string KindOf(const PlanFile& file, const Known& known) {
  if (file.profile.architecture.empty()) {
    return "generic";
  }
  const GpuSpec& gpu = file.cluster.gpu;
  const bool knows_chip =
      known.on_this_gpu ||
      (known.is_of_catalog && ProfileTargets(gpu).size() == 2 && HasFit([&](const ProfileFit& fit) {
         return FindGpu(fit.gpu, "bands").architecture == gpu.architecture;
       }));
  const bool knows_stack = KnowsStack(file.kernels.name) && !IsOnNewMesh(file);
  return knows_chip ? (knows_stack ? "known" : "stack") : (knows_stack ? "chip" : "both");
}

double HalfWidth(const std::string& kind) {
  static const JsonValue data =
      JsonValue::Parse(EmbeddedBands().front().text, std::string(EmbeddedBands().front().path));
  return data.At("kinds").At(kind).At("half_width").AsDouble();
}

// The kind, and what was seen of such runs; the user's own profiles have no runs.
std::pair<std::string, double> LeastBand(const PlanFile& file, const Known& known,
                                         std::string_view source) {
  if (known.is_own) {
    return {"own", 0};
  }
  if (known.on_this_gpu && !IsOnNewMesh(file) && known.fit->Knows(source) &&
      known.fit->RunCount(file.kernels.name) > 0) {
    return {"source", kBandPerMeanError * known.fit->left_out_error};
  }
  std::string kind = KindOf(file, known);
  for (const auto& [is_of, special] :
       {std::pair(file.plan.offload != Offload(), "offload"),
        std::pair(file.kernels.fp8 != Fp8Products::kNone, "fp8"),
        std::pair(ProfileTargets(file.cluster.gpu).size() > 2, "half rate"),
        std::pair(file.cluster.gpu.vendor != "nvidia", "other maker")}) {
    if (is_of && HalfWidth(special) > HalfWidth(kind)) {
      kind = special;
    }
  }
  return {kind, HalfWidth(kind)};
}

}  // namespace

std::string HowSure(const Confidence& confidence) {
  const std::string width = "within " + Fixed(100 * confidence.band, "%.1f %%") + "; ";
  return (confidence.kind == "own" ? width : "8 of 10 such runs are " + width) + confidence.text;
}

std::string ConfidenceText(const PlanFile& file) {
  return TextOf(file, KnownOf(file));
}

Confidence ConfidenceOf(const PlanFile& file, std::string_view source) {
  const Known known = KnownOf(file);
  const auto [kind, least] = LeastBand(file, known, source);
  const std::string text = TextOf(file, known);
  return {IsOnNewMesh(file)
              ? text + "; none cuts layers or tokens, shares out experts or has stages"
              : text,
          std::max(StepTimeBand(file), least), kind};
}

}  // namespace shardwright
