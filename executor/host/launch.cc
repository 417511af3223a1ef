#include "executor/host/launch.h"

#include <cstdlib>
#include <initializer_list>

#include <arpa/inet.h>
#include <netinet/in.h>

#include "core/error.h"
#include "core/ranges.h"
#include "core/text.h"

namespace shardwright {
namespace {

constexpr int kMostRanks = 1 << 20;
constexpr int kMostPorts = 65535;
constexpr const char* kThisMachine = "127.0.0.1";

class Environment {
 public:
  explicit Environment(const EnvironmentLookup& lookup) : lookup_(lookup) {}

  [[nodiscard]] bool Has(const char* name) const {
    const char* const text = lookup_(name);
    return text != nullptr && *text != '\0';
  }
  [[nodiscard]] std::string Text(const char* name) const { return Has(name) ? lookup_(name) : ""; }
  [[nodiscard]] int Number(const char* name, int least, int most) const {
    const std::string text = Text(name);
    const std::optional<std::int64_t> value = IntegerIn(text);
    if (!value || *value < least || *value > most) {
      throw InputError("environment: " + std::string(name), text.empty() ? "nothing" : text,
                       "a number from " + std::to_string(least) + " to " + std::to_string(most));
    }
    return static_cast<int>(*value);
  }
  [[nodiscard]] int Number(const char* name, int least, int most, int otherwise) const {
    return Has(name) ? Number(name, least, most) : otherwise;
  }
  // The first of these that is set; where none is, the first of all.
  [[nodiscard]] const char* FirstOf(std::initializer_list<const char*> names) const {
    const auto* const found =
        FindIf(names, [&](const char* name) { return name != nullptr && Has(name); });
    return found == names.end() ? *names.begin() : *found;
  }

 private:
  const EnvironmentLookup& lookup_;
};

// What a launcher calls a process's rank and their number, in all and on its machine.
struct LauncherNames {
  const char *launcher, *rank, *size, *local_rank, *local_size;
};
constexpr LauncherNames kTorchrun = {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK",
                                     "LOCAL_WORLD_SIZE"};
constexpr LauncherNames kOpenMpi = {"mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                                    "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"};
constexpr LauncherNames kSlurm = {"srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID",
                                  "SLURM_NTASKS_PER_NODE"};
// Of MPIs that the MPI module is not built for: their ranks meet as those of torchrun.
constexpr LauncherNames kMvapich = {"MVAPICH2", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE",
                                    "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"};
constexpr LauncherNames kHydra = {"mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID",
                                  "MPI_LOCALNRANKS"};
constexpr LauncherNames kFlux = {"flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID",
                                 ""};

Launch NumbersOf(const Environment& env, const LauncherNames& names) {
  Launch launch;
  launch.launcher = names.launcher;
  launch.size = env.Number(names.size, 1, kMostRanks);
  launch.rank = env.Number(names.rank, 0, launch.size - 1);
  // Launchers that set PMI_RANK have one of three names for what is local; a wrapper may know more.
  const bool is_hydra = names.rank == kHydra.rank;
  const char* const local_rank =
      env.FirstOf({names.local_rank, is_hydra ? "PMI_LOCAL_RANK" : nullptr,
                   is_hydra ? "PALS_LOCAL_RANKID" : nullptr, kTorchrun.local_rank});
  const char* const local_size =
      env.FirstOf({names.local_size, is_hydra ? "PMI_LOCAL_SIZE" : nullptr,
                   is_hydra ? "PALS_LOCAL_SIZE" : nullptr});
  launch.local_rank = env.Number(local_rank, 0, launch.size - 1, launch.size > 1 ? -1 : 0);
  launch.local_size = env.Number(local_size, 1, kMostRanks, launch.size);
  launch.local_rank_name = names.local_rank;
  return launch;
}

// torchrun's own store listens at MASTER_PORT, unless it says that rank 0 shall.
int PortOf(const Environment& env) {
  const int port = env.Number("MASTER_PORT", 1, kMostPorts - 1);
  return env.Text("TORCHELASTIC_USE_AGENT_STORE") == "True" ? port + 1 : port;
}

// Its value is never shown.
std::string KeyOf(const Environment& env) {
  std::string key = env.Text("SHARDWRIGHT_KEY");
  if (!key.empty() && key.size() < kShortestKey) {
    throw InputError("environment: SHARDWRIGHT_KEY", std::to_string(key.size()) + " characters",
                     "at least " + std::to_string(kShortestKey));
  }
  return key;
}

// Ranks that meet where MASTER_ADDR and MASTER_PORT say.
Launch OfTorchrun(const Environment& env, const LauncherNames& names) {
  Launch launch = NumbersOf(env, names);
  if (launch.size > 1) {
    if (!env.Has("MASTER_ADDR")) {
      throw InputError(
          "environment: MASTER_ADDR", "nothing", "the machine that rank 0 runs on",
          launch.launcher == kTorchrun.launcher
              ? ""
              : "the ranks of " + launch.launcher + " meet there, at a free MASTER_PORT");
    }
    // Where one agent has started all, the network has nothing to do with it.
    const bool is_one_machine = env.Number("LOCAL_WORLD_SIZE", 0, kMostRanks, 0) == launch.size;
    launch.address = is_one_machine ? kThisMachine : env.Text("MASTER_ADDR");
    launch.port = PortOf(env);
    launch.job = env.Text("TORCHELASTIC_RUN_ID");
    launch.is_own = env.Has("SHARDWRIGHT_LISTENER");
    launch.listener = env.Number("SHARDWRIGHT_LISTENER", -1, kMostRanks, -1);
    launch.key = KeyOf(env);
  }
  return launch;
}

Launch OfSlurm(const Environment& env) {
  Launch launch = NumbersOf(env, kSlurm);
  if (launch.size == 1) {
    return launch;
  }
  launch.address = env.Has("MASTER_ADDR") ? env.Text("MASTER_ADDR")
                   : env.Text("SLURM_STEP_NUM_NODES") == "1"
                       ? kThisMachine
                       : FirstHost(env.Text(env.Has("SLURM_STEP_NODELIST") ? "SLURM_STEP_NODELIST"
                                                                           : "SLURM_JOB_NODELIST"));
  if (launch.address.empty()) {
    throw InputError("environment: SLURM_JOB_NODELIST", "nothing", "the job's machines",
                     "set MASTER_ADDR to the machine that rank 0 runs on");
  }
  launch.key = KeyOf(env);
  launch.job = env.Text("SLURM_JOB_ID") + '.' + env.Text("SLURM_STEP_ID");
  // Steps of one job may run side by side.
  constexpr int kFirstPort = 20000, kPorts = 10000, kStepStride = 97;
  launch.port = env.Has("MASTER_PORT")
                    ? PortOf(env)
                    : kFirstPort + (env.Number("SLURM_JOB_ID", 0, INT32_MAX, 0) % kPorts +
                                    env.Number("SLURM_STEP_ID", 0, kMostRanks, 0) * kStepStride) %
                                       kPorts;
  return launch;
}

bool HasRank(const Environment& env, const LauncherNames& names) {
  return env.Has(names.rank) && env.Has(names.size);
}

// Whether srun has started this process. sbatch sets the same for its script, which is one process:
// its step's number, if it has one, is a huge one.
bool IsInStep(const Environment& env) {
  constexpr std::size_t kDigits = 6;
  const std::string step = env.Text("SLURM_STEP_ID");
  return HasRank(env, kSlurm) && !step.empty() && step.size() <= kDigits;
}

// srun and flux set PMI_RANK as well. Where it differs from their own numbers, or says more than
// they would, they have started another launcher.
bool HasSetPmi(const Environment& env, const LauncherNames& names) {
  return HasRank(env, names) && env.Text(kHydra.rank) == env.Text(names.rank) &&
         env.Text(kHydra.size) == env.Text(names.size) && !env.Has(kHydra.local_rank);
}

}  // namespace

std::string DescribePlacement(const std::vector<std::string>& hosts, std::int64_t per_machine) {
  for (std::size_t r = 0; r < hosts.size(); ++r) {
    const std::size_t first = r - r % static_cast<std::size_t>(per_machine);
    if (hosts[r] != hosts[first]) {
      const std::size_t last =
          std::min(first + static_cast<std::size_t>(per_machine), hosts.size());
      return "the plan has ranks " + std::to_string(first) + " to " + std::to_string(last - 1) +
             " on one machine, but rank " + std::to_string(first) + " runs on " + hosts[first] +
             " and rank " + std::to_string(r) + " on " + hosts[r] +
             ": their collectives go over the network; start neighbouring ranks on one machine";
    }
  }
  return {};
}

bool IsLoopback(const std::string& address) {
  constexpr std::uint32_t kLoopbackNet = 127;
  in_addr four{};
  in6_addr six{};
  return address == "localhost" ||
         (::inet_pton(AF_INET, address.c_str(), &four) == 1 &&
          ntohl(four.s_addr) >> 24U == kLoopbackNet) ||
         (::inet_pton(AF_INET6, address.c_str(), &six) == 1 && IN6_IS_ADDR_LOOPBACK(&six));
}

std::string FirstHost(const std::string& node_list) {
  const std::size_t open = node_list.find_first_of("[,");
  if (open == std::string::npos || node_list[open] == ',') {
    return node_list.substr(0, open);
  }
  const std::size_t end = node_list.find_first_of("-,]", open);
  const std::size_t close = node_list.find(']', open);
  if (end == std::string::npos || close == std::string::npos) {
    throw InputError("environment: node list", '"' + node_list + '"', "one such as gpu[01-04]");
  }
  const std::size_t behind = node_list.find(',', close);
  return node_list.substr(0, open) + node_list.substr(open + 1, end - open - 1) +
         node_list.substr(close + 1, behind == std::string::npos ? behind : behind - close - 1);
}

Launch ReadLaunch(const EnvironmentLookup& lookup) {
  const Environment env(lookup);
  if (env.Has("RANK") && env.Has("WORLD_SIZE")) {
    return OfTorchrun(env, kTorchrun);
  }
  if (env.Has("OMPI_COMM_WORLD_SIZE")) {
    return NumbersOf(env, kOpenMpi);
  }
  if (HasRank(env, kMvapich)) {
    return OfTorchrun(env, kMvapich);
  }
  const bool has_pmi = HasRank(env, kHydra);
  if (HasRank(env, kFlux) && (!has_pmi || HasSetPmi(env, kFlux))) {
    return OfTorchrun(env, kFlux);
  }
  const bool is_srun = IsInStep(env) && !env.Has(kFlux.rank);
  if (has_pmi && !(is_srun && HasSetPmi(env, kSlurm))) {
    return OfTorchrun(env, kHydra);
  }
  if (is_srun) {
    return OfSlurm(env);
  }
  // A rank of several that runs the whole plan would train it as often as there are ranks.
  for (const char* const name : {"RANK", "WORLD_SIZE", "PMIX_RANK", "PALS_RANKID"}) {
    if (env.Has(name)) {
      throw InputError("environment: " + std::string(name), env.Text(name) + " alone",
                       "RANK and WORLD_SIZE, or neither",
                       "for a run without other ranks: unset " + std::string(name));
    }
  }
  return {};
}

Launch ReadLaunch() {
  return ReadLaunch([](const char* name) -> const char* { return std::getenv(name); });
}

}  // namespace shardwright
