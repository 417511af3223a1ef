// What launchers' environments say.

#include "executor/host/launch.h"

#include <map>
#include <string>

#include <doctest/doctest.h>

#include "core/error.h"

namespace shardwright::testing {
namespace {

using Variables = std::map<std::string, std::string>;

Launch Read(const Variables& variables) {
  return ReadLaunch([&](const char* name) {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

TEST_CASE("Launch.Torchrun") {
  Variables variables = {{"RANK", "5"},         {"WORLD_SIZE", "8"},      {"LOCAL_RANK", "1"},
                         {"MASTER_ADDR", "n1"}, {"MASTER_PORT", "29500"}, {"SLURM_PROCID", "0"},
                         {"SLURM_NTASKS", "2"}, {"SLURM_STEP_ID", "0"}};
  const Launch plain = Read(variables);
  CHECK(plain.launcher == "torchrun");
  CHECK(plain.rank == 5);
  CHECK(plain.size == 8);
  CHECK(plain.local_rank == 1);
  CHECK(plain.local_size == 8);  // torchrun would say
  CHECK(plain.address == "n1");
  CHECK(plain.port == 29500);
  // The agent listens at MASTER_PORT itself.
  variables["TORCHELASTIC_USE_AGENT_STORE"] = "True";
  CHECK(Read(variables).port == 29501);
  // One agent has started all.
  variables["LOCAL_WORLD_SIZE"] = "8";
  CHECK(Read(variables).address == "127.0.0.1");
  variables["LOCAL_WORLD_SIZE"] = "4";
  CHECK(Read(variables).address == "n1");
  variables["RANK"] = "8";
  CHECK_THROWS_WITH_AS(Read(variables), "environment: RANK: got 8, expected a number from 0 to 7",
                       InputError);
  variables["RANK"] = "0";
  variables.erase("MASTER_ADDR");
  CHECK_THROWS_WITH_AS(
      Read(variables),
      "environment: MASTER_ADDR: got nothing, expected the machine that rank 0 runs on",
      InputError);
}

TEST_CASE("Launch.KeyAndLoopback") {
  Variables variables = {{"RANK", "1"},
                         {"WORLD_SIZE", "2"},
                         {"MASTER_ADDR", "n1"},
                         {"MASTER_PORT", "29500"},
                         {"SHARDWRIGHT_KEY", std::string(32, 'k')}};
  CHECK(Read(variables).key == std::string(32, 'k'));
  CHECK(!Read(variables).is_own);
  variables["SHARDWRIGHT_LISTENER"] = "-1";
  CHECK(Read(variables).is_own);
  variables["SHARDWRIGHT_KEY"] = "secret";  // is not shown
  CHECK_THROWS_WITH_AS(Read(variables),
                       "environment: SHARDWRIGHT_KEY: got 6 characters, expected at least 32",
                       InputError);
  for (const char* const address : {"localhost", "127.0.0.1", "127.0.1.1", "::1"}) {
    CHECK(IsLoopback(address));
  }
  for (const char* const address : {"", "n1", "localhost.example.org", "127.0.0.1.example.org",
                                    "10.127.0.1", "::", "0.0.0.0"}) {
    CHECK(!IsLoopback(address));
  }
}

TEST_CASE("Launch.OpenMpi") {
  const Launch launch = Read({{"OMPI_COMM_WORLD_SIZE", "4"},
                              {"OMPI_COMM_WORLD_RANK", "3"},
                              {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                              {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                              {"SLURM_PROCID", "0"},
                              {"SLURM_NTASKS", "1"},
                              {"SLURM_STEP_ID", "0"}});
  CHECK(launch.launcher == "mpirun");
  CHECK(launch.rank == 3);
  CHECK(launch.size == 4);
  CHECK(launch.local_rank == 1);
  CHECK(launch.local_size == 2);
  CHECK(launch.address.empty());
}

// mpiexec of MPICH, Intel MPI and MVAPICH2, and flux: every rank would train the whole plan alone.
TEST_CASE("Launch.EveryLauncherIsKnownOrRefused") {
  const Variables place = {{"MASTER_ADDR", "n1"}, {"MASTER_PORT", "29500"}};
  const auto with = [&](Variables variables) {
    variables.insert(place.begin(), place.end());
    return Read(variables);
  };
  const Launch hydra = with({{"PMI_RANK", "3"},
                             {"PMI_SIZE", "4"},
                             {"MPI_LOCALRANKID", "1"},
                             {"MPI_LOCALNRANKS", "2"},
                             // Where srun has started one proxy on each machine:
                             {"SLURM_PROCID", "1"},
                             {"SLURM_NTASKS", "2"},
                             {"SLURM_STEP_ID", "0"}});
  CHECK(hydra.launcher == "mpiexec");
  CHECK(hydra.rank == 3);
  CHECK(hydra.size == 4);
  CHECK(hydra.local_rank == 1);
  CHECK(hydra.local_size == 2);
  CHECK(hydra.address == "n1");
  CHECK(hydra.port == 29500);
  const Launch mvapich = with({{"MV2_COMM_WORLD_RANK", "1"},
                               {"MV2_COMM_WORLD_SIZE", "2"},
                               {"MV2_COMM_WORLD_LOCAL_RANK", "1"}});
  CHECK(mvapich.launcher == "MVAPICH2");
  CHECK(mvapich.rank == 1);
  CHECK(mvapich.local_rank == 1);
  const Launch flux = with({{"FLUX_TASK_RANK", "1"}, {"FLUX_JOB_SIZE", "2"}});
  CHECK(flux.rank == 1);
  CHECK(flux.local_rank == -1);
  // srun --mpi=pmi2 says the same twice.
  const Launch srun = Read({{"PMI_RANK", "1"},
                            {"PMI_SIZE", "2"},
                            {"SLURM_PROCID", "1"},
                            {"SLURM_NTASKS", "2"},
                            {"SLURM_STEP_ID", "0"},
                            {"SLURM_JOB_NODELIST", "n[1-2]"}});
  CHECK(srun.launcher == "srun");
  // mpiexec in a script of sbatch, whose own process is task 0 of 2; and mpiexec whose proxies srun
  // has started.
  for (const char* const step : {"", "4294967291", "0"}) {
    for (const char* const rank : {"0", "1"}) {
      Variables variables = {{"PMI_RANK", rank},      {"PMI_SIZE", "2"},
                             {"SLURM_PROCID", "0"},   {"SLURM_NTASKS", "2"},
                             {"SLURM_STEP_ID", step}, {"SLURM_JOB_NODELIST", "n[1-2]"}};
      if (*step == '0') {
        variables["MPI_LOCALRANKID"] = rank;
      }
      CHECK_THROWS_AS(Read(variables), InputError);  // MASTER_ADDR
      const Launch launch = with(variables);
      CHECK(launch.launcher == "mpiexec");
      CHECK(launch.rank == *rank - '0');
      CHECK(launch.size == 2);
    }
  }
  CHECK_THROWS_WITH_AS(
      Read({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}}),
      "environment: MASTER_ADDR: got nothing, expected the machine that rank 0 runs "
      "on; the ranks of mpiexec meet there, at a free MASTER_PORT",
      InputError);
  for (const char* const name : {"RANK", "WORLD_SIZE", "PMIX_RANK", "PALS_RANKID"}) {
    CHECK_THROWS_AS(Read({{name, "1"}}), InputError);
  }
  CHECK(Read({{"PMI_RANK", "0"}, {"PMI_SIZE", "1"}}).size == 1);
}

TEST_CASE("Launch.LocalRankOfEveryLauncher") {
  Variables variables = {
      {"PMI_RANK", "3"}, {"PMI_SIZE", "4"}, {"MASTER_ADDR", "n1"}, {"MASTER_PORT", "29500"}};
  CHECK(Read(variables).local_rank == -1);
  CHECK(Read(variables).local_rank_name == "MPI_LOCALRANKID");
  variables["LOCAL_RANK"] = "3";  // of a script that knows better
  CHECK(Read(variables).local_rank == 3);
  variables["PALS_LOCAL_RANKID"] = "2";
  variables["PALS_LOCAL_SIZE"] = "3";
  CHECK(Read(variables).local_rank == 2);
  CHECK(Read(variables).local_size == 3);
  variables["PMI_LOCAL_RANK"] = "1";
  variables["PMI_LOCAL_SIZE"] = "2";
  CHECK(Read(variables).local_rank == 1);
  CHECK(Read(variables).local_size == 2);
  variables["MPI_LOCALRANKID"] = "0";
  CHECK(Read(variables).local_rank == 0);
  // flux sets PMI_RANK as well.
  variables = {{"PMI_RANK", "1"},       {"PMI_SIZE", "2"},           {"FLUX_TASK_RANK", "1"},
               {"FLUX_JOB_SIZE", "2"},  {"FLUX_TASK_LOCAL_ID", "0"}, {"MASTER_ADDR", "n1"},
               {"MASTER_PORT", "29500"}};
  CHECK(Read(variables).launcher == "flux");
  CHECK(Read(variables).local_rank == 0);
  variables["PMI_RANK"] = "0";  // mpiexec in a task of flux
  CHECK(Read(variables).launcher == "mpiexec");
  CHECK(Read(variables).rank == 0);
}

TEST_CASE("Launch.AGpuIsNotTakenByChance") {
  Variables variables = {
      {"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "n1"}, {"MASTER_PORT", "29500"}};
  CHECK(Read(variables).local_rank == -1);
  variables["WORLD_SIZE"] = "1";
  variables["RANK"] = "0";
  CHECK(Read(variables).local_rank == 0);
}

TEST_CASE("Launch.RanksAreOnThePlansMachines") {
  CHECK(DescribePlacement({"a", "a", "b", "b"}, 2).empty());
  CHECK(DescribePlacement({"a", "a", "a", "a"}, 2).empty());
  CHECK(DescribePlacement({"a"}, 8).empty());
  CHECK(DescribePlacement({"a", "b", "a", "b"}, 2) ==
        "the plan has ranks 0 to 1 on one machine, but rank 0 runs on a and rank 1 on b: their "
        "collectives go over the network; start neighbouring ranks on one machine");
  CHECK(DescribePlacement({"a", "a", "b", "c"}, 2).find("ranks 2 to 3") != std::string::npos);
}

TEST_CASE("Launch.Slurm") {
  Variables variables = {{"SLURM_PROCID", "9"},
                         {"SLURM_NTASKS", "16"},
                         {"SLURM_LOCALID", "1"},
                         {"SLURM_NTASKS_PER_NODE", "8"},
                         {"SLURM_JOB_NODELIST", "gpu[007-008]"},
                         {"SLURM_JOB_ID", "123456"}};
  // A batch script is one process, which srun has not started.
  CHECK(Read(variables).launcher.empty());
  variables["SLURM_STEP_ID"] = "4294967291";
  CHECK(Read(variables).size == 1);
  variables["SLURM_STEP_ID"] = "2";
  const Launch launch = Read(variables);
  CHECK(launch.launcher == "srun");
  CHECK(launch.rank == 9);
  CHECK(launch.local_rank == 1);
  CHECK(launch.local_size == 8);
  CHECK(launch.address == "gpu007");
  CHECK(launch.port == 20000 + 3456 + 2 * 97);
  CHECK(launch.job == "123456.2");
  variables["MASTER_PORT"] = "5000";
  CHECK(Read(variables).port == 5000);
  variables["SLURM_STEP_NUM_NODES"] = "2";
  CHECK(Read(variables).address == "gpu007");
  variables["SLURM_STEP_NUM_NODES"] = "1";
  CHECK(Read(variables).address == "127.0.0.1");
  variables["MASTER_ADDR"] = "gpu007";
  CHECK(Read(variables).address == "gpu007");
}

TEST_CASE("Launch.NoneAndFirstHost") {
  CHECK(Read({}).launcher.empty());
  CHECK(Read({}).size == 1);
  CHECK(FirstHost("node") == "node");
  CHECK(FirstHost("node1,node2") == "node1");
  CHECK(FirstHost("gpu[007-010,12],login1") == "gpu007");
  CHECK(FirstHost("rack[3,5]-ib,x") == "rack3-ib");
  CHECK_THROWS_AS(FirstHost("gpu[007"), InputError);
}

}  // namespace
}  // namespace shardwright::testing
