#pragma once

// Who started this process, and as which of how many: mpirun, torchrun, srun, or `shardwright run`
// itself. Read from the environment that each of them sets.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace shardwright {

struct Launch {
  std::string launcher = {};  // "mpirun", "torchrun" or "srun"; empty: this process is alone
  int rank = 0;
  int size = 1;
  // Among the processes of this machine: which GPU is meant. -1: the launcher does not say.
  int local_rank = 0;
  int local_size = 1;  // processes of this machine, all of them where the launcher does not say
  // Where the processes meet: rank 0 listens there. Empty: they need not (mpirun).
  std::string address = {};
  int port = 0;
  std::string job = {};  // what the launcher calls this run; equal on all ranks
  bool is_own = false;   // a parent of this program started it, with a key
  int listener = -1;     // a listening socket that this process inherited; -1: none
  // What all ranks prove to each other before they meet (tcp_handshake.h): of --rendezvous-key, or
  // the environment's SHARDWRIGHT_KEY, which only this user's processes see. Empty: there is none.
  std::string key = {};
  bool is_insecure = false;                    // whoever reaches rank 0 may be a rank
  std::string local_rank_name = "LOCAL_RANK";  // the launcher's variable for it, for messages
};
inline constexpr std::size_t kShortestKey = 32;

// Whether only this machine reaches an address: "localhost", 127.*, ::1. Other names are not looked
// up, so that all ranks answer alike.
[[nodiscard]] bool IsLoopback(const std::string& address);

// The value of an environment variable; null when it is not set.
using EnvironmentLookup = std::function<const char*(const char* name)>;

// Reads, in this order: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT (torchrun and
// whoever imitates it); OMPI_COMM_WORLD_* (mpirun of Open MPI); MV2_COMM_WORLD_*, PMI_RANK and
// PMI_SIZE, FLUX_* (MVAPICH2, MPICH and Intel MPI, Flux; they need MASTER_ADDR and MASTER_PORT);
// SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID (srun). torchrun listens at MASTER_PORT itself, so its
// ranks meet at the port behind it. Under srun without MASTER_ADDR and MASTER_PORT the first host
// of the job is taken, and a port made of the job's number. All ranks of one machine
// (LOCAL_WORLD_SIZE is WORLD_SIZE; SLURM_STEP_NUM_NODES is 1 and there is no MASTER_ADDR) meet at
// 127.0.0.1. None of the launchers gives its processes a secret, so the key is read from
// SHARDWRIGHT_KEY, if that is set. Throws InputError for a half-set or senseless environment.
[[nodiscard]] Launch ReadLaunch(const EnvironmentLookup& lookup);
// Of this process.
[[nodiscard]] Launch ReadLaunch();

// Where ranks that the plan has on one machine, `per_machine` neighbours, run on several: what is
// wrong with that, or an empty text. hosts[r]: the machine of rank r.
[[nodiscard]] std::string DescribePlacement(const std::vector<std::string>& hosts,
                                            std::int64_t per_machine);

// The first host of a Slurm node list: "gpu007" of "gpu[007-010,12],login1".
[[nodiscard]] std::string FirstHost(const std::string& node_list);

}  // namespace shardwright
