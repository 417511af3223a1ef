#include "cli/run_processes.h"

#include <array>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cli/command.h"
#include "cli/exit_codes.h"
#include "cli/guard.h"
#include "cli/stop_signals.h"
#include "core/cores.h"
#include "core/error.h"
#include "core/files.h"
#include "core/json.h"
#include "core/printable.h"
#include "core/ranges.h"
#include "core/threads.h"
#include "executor/host/tcp_handshake.h"
#include "executor/host/tcp_processes.h"
#include "executor/host/tcp_socket.h"

namespace shardwright {

namespace {

// Every rank's machine by its name, as NCCL tells machines apart.
void CheckPlacement(MessagePassing& processes, std::int64_t per_machine) {
  std::array<char, 64> host{};
  (void)::gethostname(host.data(), host.size() - 1);
  std::string name = host.data();
  constexpr const char* kBoot = "/proc/sys/kernel/random/boot_id";
  if (Exists(kBoot)) {  // several machines may be called "localhost"
    name += " (boot " + ReadTextFile(kBoot).substr(0, 8) + ')';
  }
  const auto* const bytes = reinterpret_cast<const std::byte*>(name.data());
  std::vector<std::string> hosts;
  for (const auto& its : CollectBytes(processes, MessagePassing::kAll, {"names of machines"},
                                      {bytes, bytes + name.size()})) {
    constexpr std::size_t kLongest = 80;
    if (its.empty() || its.size() > kLongest) {
      throw RunError("rank " + std::to_string(hosts.size()) + ": a machine's name of " +
                     std::to_string(its.size()) + " bytes");
    }
    hosts.emplace_back(reinterpret_cast<const char*>(its.data()), its.size());
  }
  if (const std::string problem = DescribePlacement(hosts, per_machine); !problem.empty()) {
    Warn(problem);
  }
}

}  // namespace

RunProcesses::RunProcesses(const Launch& launch, const Cluster& cluster,
                           std::chrono::milliseconds timeout,
                           const std::function<RankFacts()>& facts) {
  if (launch.size <= 1) {
    return;
  }
  if (launch.address.empty()) {
    processes_ = &JoinProcesses(timeout);
  } else {
    if (launch.is_insecure && launch.rank == 0) {
      Warn("--insecure-network: whoever reaches port " + std::to_string(launch.port) +
           " of this machine may take a rank, change the result or end the run");
    }
    owned_ = MeetByTcp(launch, timeout);
    processes_ = owned_.get();
  }
  CheckAlike(processes_, facts());
  if (launch.size != cluster.RankCount()) {
    throw UsageError("the plan has " + std::to_string(cluster.RankCount()) + " ranks, but " +
                     launch.launcher + " started " + std::to_string(launch.size) + " processes");
  }
  CheckPlacement(*processes_, cluster.gpus_per_node);
}

RunProcesses::~RunProcesses() = default;

void EndSetUp(MessagePassing* processes, std::chrono::milliseconds timeout) {
  if (processes != nullptr) {
    (void)ShareBytes(*processes, MessagePassing::kAll, {"end of the set-up"}, {});
    processes->set_timeout(timeout);
  }
}

constexpr std::chrono::seconds kGrace{5};  // for threads to end after a failure

std::int64_t HostThreads(const Launch& launch, std::int64_t ranks) {
  const std::int64_t here = launch.launcher.empty() ? ranks : std::max(launch.local_size, 1);
  return std::max<std::int64_t>(
      1, static_cast<std::int64_t>(AvailableCores() / static_cast<double>(here)));
}

void EndProcessOnFault(RunSession& session, MessagePassing* processes) {
  session.faults().OnReport([&session, processes](const std::string& cause) {
    SayLines(session.DescribeRanks());
    try {
      StartThread([cause, code = session.faults().is_environment() ? kExitEnvironment : kExitRun] {
        std::this_thread::sleep_for(kGrace);
        SayOnce("error: " + cause);
        std::_Exit(code);
      }).detach();
    } catch (const EnvironmentError&) {
      // Then nobody helps threads that do not end.
    }
    if (processes != nullptr) {  // may block: the others may stand still, too
      processes->Fail(cause);
    }
  });
}

namespace {

std::vector<std::string> OwnCommandLine() {
  std::vector<std::string> words;
  const std::string text = ReadTextFile("/proc/self/cmdline");
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = text.find('\0', at);
    words.push_back(text.substr(at, end - at));
    at = end == std::string::npos ? text.size() : end + 1;
  }
  return words;
}

// The environment of rank `rank`; names of ours replace those that are there.
std::vector<std::string> EnvironmentOf(std::int64_t rank, std::int64_t ranks,
                                       const tcp::Socket& listener, const std::string& key,
                                       const tcp::Socket& said) {
  std::vector<std::string> ours = {
      "RANK=" + std::to_string(rank), "LOCAL_RANK=" + std::to_string(rank),
      "WORLD_SIZE=" + std::to_string(ranks), "LOCAL_WORLD_SIZE=" + std::to_string(ranks),
      "MASTER_ADDR=127.0.0.1", "MASTER_PORT=" + std::to_string(tcp::PortOf(listener)),
      "SHARDWRIGHT_KEY=" + key, std::string(kSaidVariable) + '=' + std::to_string(said.fd()),
      // Of rank 0; that the others have none tells whose they are.
      "SHARDWRIGHT_LISTENER=" + std::to_string(rank == 0 ? listener.fd() : -1)};
  if (std::getenv("NCCL_SOCKET_IFNAME") == nullptr) {
    ours.emplace_back("NCCL_SOCKET_IFNAME=lo");  // NCCL's own sockets need no network, either
  }
  std::vector<std::string> all = ours;
  for (char** at = environ; *at != nullptr; ++at) {
    const std::string entry = *at;
    const std::string name = entry.substr(0, entry.find('=') + 1);
    const bool is_ours = AnyOf(ours, [&](const std::string& our) { return our.starts_with(name); });
    if (!is_ours) {
      all.push_back(entry);
    }
  }
  return all;
}

std::vector<char*> Pointers(std::vector<std::string>& words) {
  std::vector<char*> pointers;
  for (std::string& word : words) {
    pointers.push_back(word.data());
  }
  pointers.push_back(nullptr);
  return pointers;
}

// A child's end as this program's exit code; 0: it ended well.
int CodeOf(int status, std::int64_t rank) {
  if (WIFEXITED(status)) {
    return WEXITSTATUS(status);
  }
  Say("error: rank " + std::to_string(rank) + ": ended by signal " +
      std::to_string(WTERMSIG(status)));
  return kExitRun;
}

void SendAll(const std::vector<pid_t>& children, int signal) {
  for (const pid_t child : children) {
    if (child > 0) {
      (void)::kill(child, signal);
    }
  }
}

}  // namespace

int RunLocalProcesses(std::int64_t ranks) {
  tcp::Socket listener = tcp::Listen("127.0.0.1", 0);
  const std::string key = tcp::NewKey();
  (void)::fcntl(listener.fd(), F_SETFD, 0);  // children inherit it
  const tcp::Socket said(::memfd_create("errors", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  (void)::fcntl(said.fd(), F_ADD_SEALS, F_SEAL_SHRINK);  // SayOnce knows it by that
  std::vector<std::string> words = OwnCommandLine();
  std::vector<pid_t> children;
  children.reserve(static_cast<std::size_t>(ranks));
  for (std::int64_t r = 0; r < ranks; ++r) {
    // Everything that allocates comes before the fork.
    std::vector<std::string> environment = EnvironmentOf(r, ranks, listener, key, said);
    const std::vector<char*> arguments = Pointers(words);
    const std::vector<char*> variables = Pointers(environment);
    const pid_t child = ::fork();
    if (child == 0) {
      (void)::prctl(PR_SET_PDEATHSIG, SIGKILL);  // nobody is left behind
      (void)::fcntl(said.fd(), F_SETFD, 0);
      if (r > 0) {
        ::close(listener.fd());
      }
      ::execve("/proc/self/exe", arguments.data(), variables.data());
      ::_exit(kExitEnvironment);
    }
    if (child < 0) {
      SendAll(children, SIGKILL);
      throw EnvironmentError("cannot start a process: " + std::string(std::strerror(errno)));
    }
    children.push_back(child);
  }
  listener = tcp::Socket();  // it closes when rank 0 closes it
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::seconds kPatience{15};  // failing ranks end each other within five
  Clock::time_point give_up = Clock::time_point::max();
  int code = kExitOk;
  int passed_on = 0;
  InstallSignalCount();  // they save what they have, and then end
  for (std::int64_t left = ranks; left > 0;) {
    int status = 0;
    const pid_t ended = ::waitpid(-1, &status, WNOHANG);
    const auto found = FindIn(children, ended);
    if (ended > 0 && found != children.end()) {
      const int its = CodeOf(status, found - children.begin());
      *found = 0;
      --left;
      if (its != kExitOk && code == kExitOk) {
        code = its;
        give_up = Clock::now() + kPatience;
      }
      continue;
    }
    if (const int signals = SignalCount(); signals > passed_on) {
      passed_on = signals;
      SendAll(children, SIGTERM);
    }
    if (Clock::now() > give_up) {
      SendAll(children, SIGKILL);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return code;
}

}  // namespace shardwright
