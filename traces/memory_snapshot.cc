#include "traces/memory_snapshot.h"

#include <map>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "core/ranges.h"
#include "traces/internal/pickle.h"

namespace shardwright {
namespace {

using internal::Pickle;
using Ref = Pickle::Ref;
using Kind = Pickle::Kind;

constexpr std::string_view kSnapshotRule = "a snapshot that torch.cuda.memory._dump_snapshot wrote";
constexpr std::string_view kBefore = "before the recording";
constexpr std::size_t kMostSites = 20;
// References let a small file name one list many times; no snapshot does.
constexpr std::int64_t kVisitsPerByte = 8;

class SnapshotReader {
 public:
  explicit SnapshotReader(const std::string& file)
      : file_(file), pickle_(Pickle::Read(file, kSnapshotRule)) {}

  MemorySnapshot Run() {
    const Ref root = pickle_.root();
    if (pickle_.KindOf(root) != Kind::kDict) {
      pickle_.Fail("root", "no dictionary");
    }
    ReadSegments(pickle_.Required(root, "segments", Kind::kList));
    const std::vector<Ref>& traces =
        pickle_.ItemsOf(pickle_.Required(root, "device_traces", Kind::kList));
    for (std::size_t device = 0; device < traces.size(); ++device) {
      if (pickle_.KindOf(traces[device]) != Kind::kList) {
        pickle_.Fail("device_traces", "an entry that is no list");
      }
      if (!pickle_.ItemsOf(traces[device]).empty()) {
        ReadTrace(DeviceOf(static_cast<std::int64_t>(device)), pickle_.ItemsOf(traces[device]));
      }
    }
    MemorySnapshot result;
    result.file = file_;
    for (auto& [number, device] : devices_) {
      result.devices.push_back(std::move(device));
    }
    if (result.devices.empty()) {
      pickle_.Fail("segments", "nothing of any device");
    }
    result.notes = std::move(notes_);
    return result;
  }

 private:
  struct Event {
    std::string_view action;
    std::int64_t address = 0;
    Bytes size;
    SimTime time;
    Ref frames = Pickle::kNothing;
  };

  // Counts a step of the walk.
  void Visit() {
    constexpr std::int64_t kLeast = 1000;
    if (++visits_ > kLeast + kVisitsPerByte * pickle_.file_size()) {
      pickle_.Fail("device_traces", "more entries than a file of this size can hold");
    }
  }

  [[nodiscard]] std::int64_t Count(Ref dict, std::string_view key) const {
    constexpr std::int64_t kMost = std::int64_t{1} << 50;
    const std::int64_t value = pickle_.IntOf(pickle_.Required(dict, key, Kind::kInt));
    if (value < 0 || value > kMost) {
      pickle_.Fail(key, std::to_string(value));
    }
    return value;
  }

  DeviceSnapshot& DeviceOf(std::int64_t number) {
    DeviceSnapshot& device = devices_[number];
    device.device = number;
    return device;
  }

  void ReadSegments(Ref list) {
    for (const Ref segment : pickle_.ItemsOf(list)) {
      Visit();
      if (pickle_.KindOf(segment) != Kind::kDict) {
        pickle_.Fail("segments", "an entry that is no dictionary");
      }
      DeviceSnapshot& device = DeviceOf(Count(segment, "device"));
      device.reserved += Bytes(Count(segment, "total_size"));
      for (const Ref block : pickle_.ItemsOf(pickle_.Required(segment, "blocks", Kind::kList))) {
        Visit();
        if (pickle_.KindOf(block) != Kind::kDict) {
          pickle_.Fail("segments", "a block that is no dictionary");
        }
        if (pickle_.TextOf(pickle_.Required(block, "state", Kind::kText)) == "active_allocated") {
          device.allocated += Bytes(Count(block, "size"));
        }
      }
    }
  }

  Event ReadEvent(Ref ref, std::size_t index) {
    Visit();
    if (pickle_.KindOf(ref) != Kind::kDict) {
      pickle_.Fail("device_traces", "an event that is no dictionary");
    }
    Event event;
    event.action = pickle_.TextOf(pickle_.Required(ref, "action", Kind::kText));
    event.size = Bytes(Count(ref, "size"));
    const Ref address = pickle_.Find(ref, "addr");
    if (address != Pickle::kNothing && pickle_.KindOf(address) == Kind::kInt) {
      event.address = pickle_.IntOf(address);
    }
    const Ref time = pickle_.Find(ref, "time_us");
    const bool has_time = time != Pickle::kNothing && pickle_.KindOf(time) == Kind::kInt;
    constexpr std::int64_t kPicoseconds = 1'000'000;
    constexpr std::int64_t kLongest = std::int64_t{50} * 24 * 3600 * 1'000'000;
    if (index == 0) {
      first_time_ = has_time ? pickle_.IntOf(time) : 0;
    }
    // Unsigned: two damaged numbers may be as far apart as numbers can be.
    const std::uint64_t since = has_time ? static_cast<std::uint64_t>(pickle_.IntOf(time)) -
                                               static_cast<std::uint64_t>(first_time_)
                                         : index;
    if (since > static_cast<std::uint64_t>(kLongest)) {
      pickle_.Fail("time_us", "times that go back, or are more than 50 days apart");
    }
    event.time = SimTime(static_cast<std::int64_t>(since) * kPicoseconds);
    const Ref frames = pickle_.Find(ref, "frames");
    if (frames != Pickle::kNothing && pickle_.KindOf(frames) == Kind::kList) {
      event.frames = frames;
    }
    return event;
  }

  // What an event adds to the allocated and reserved bytes.
  static std::pair<std::int64_t, std::int64_t> ChangeOf(const Event& event) {
    const std::int64_t size = event.size.value;
    if (event.action == "alloc") {
      return {size, 0};
    }
    if (event.action == "free_requested") {
      return {-size, 0};
    }
    if (event.action == "segment_alloc" || event.action == "segment_map") {
      return {0, size};
    }
    if (event.action == "segment_free" || event.action == "segment_unmap") {
      return {0, -size};
    }
    return {0, 0};
  }

  void ReadTrace(DeviceSnapshot& device, const std::vector<Ref>& list) {
    std::vector<Event> events;
    std::int64_t allocated = device.allocated.value, reserved = device.reserved.value;
    for (std::size_t i = 0; i < list.size(); ++i) {
      events.push_back(ReadEvent(list[i], i));
      const auto [more, segment] = ChangeOf(events.back());
      allocated -= more;
      reserved -= segment;
      device.out_of_memory += events.back().action == "oom" ? 1 : 0;
    }
    // What was there when the recording began: its buffer may have dropped the first events.
    const std::int64_t before = std::max<std::int64_t>(allocated, 0);
    if (allocated < 0 || reserved < 0) {
      notes_.emplace_back("the events free more than they and the segments hold");
    }
    allocated = before;
    reserved = std::max<std::int64_t>(reserved, 0);
    device.peak_allocated = Bytes(allocated);
    device.peak_reserved = Bytes(reserved);
    std::size_t peak = 0;
    for (std::size_t i = 0; i < events.size(); ++i) {
      const auto [more, segment] = ChangeOf(events[i]);
      allocated += more;
      reserved += segment;
      device.samples.push_back({events[i].time, Bytes(allocated), Bytes(reserved)});
      device.peak_reserved = std::max(device.peak_reserved, Bytes(reserved));
      if (Bytes(allocated) > device.peak_allocated) {
        device.peak_allocated = Bytes(allocated);
        device.peak_time = events[i].time;
        peak = i + 1;
      }
    }
    events.resize(peak);
    Attribute(device, events, before);
  }

  // Who holds what at the peak, which the last of `events` reaches.
  void Attribute(DeviceSnapshot& device, const std::vector<Event>& events, std::int64_t before) {
    std::unordered_map<std::int64_t, const Event*> live;
    for (const Event& event : events) {
      if (event.action == "alloc") {
        live[event.address] = &event;
      } else if (event.action == "free_requested" && live.erase(event.address) == 0) {
        before -= event.size.value;  // of what was there before
      }
    }
    std::map<std::string, std::int64_t> categories, sites;
    if (before > 0) {
      categories[std::string(kBefore)] = sites[std::string(kBefore)] = before;
    }
    for (const auto& [address, event] : live) {
      const auto [category, site] = SiteOf(event->frames);
      categories[category] += event->size.value;
      sites[site] += event->size.value;
    }
    device.categories = Largest(categories, categories.size());
    device.sites = Largest(sites, kMostSites);
  }

  static std::vector<MemorySite> Largest(const std::map<std::string, std::int64_t>& sums,
                                         std::size_t count) {
    std::vector<MemorySite> rows;
    rows.reserve(sums.size());
    for (const auto& [name, bytes] : sums) {
      rows.push_back({name, Bytes(bytes)});
    }
    StableSort(rows, [](const auto& a, const auto& b) { return a.bytes > b.bytes; });
    rows.resize(std::min(rows.size(), count));
    return rows;
  }

  // Frames stand innermost first. What FSDP, optimizers and autograd ask for is theirs, whoever
  // called them; the site is the innermost frame outside of PyTorch.
  std::pair<std::string, std::string> SiteOf(Ref frames) {
    std::string category, site;
    if (frames != Pickle::kNothing) {
      for (const Ref frame : pickle_.ItemsOf(frames)) {
        Visit();
        if (pickle_.KindOf(frame) == Kind::kDict) {
          AddFrame(frame, category, site);
        }
      }
    }
    return {category.empty() ? "other" : category, site.empty() ? "unknown" : site};
  }

  void AddFrame(Ref frame, std::string& category, std::string& site) const {
    const auto text = [&](std::string_view key) -> std::string_view {
      const Ref ref = pickle_.Find(frame, key);
      return ref != Pickle::kNothing && pickle_.KindOf(ref) == Kind::kText
                 ? std::string_view(pickle_.TextOf(ref))
                 : std::string_view();
    };
    const std::string_view file = text("filename");
    const std::string_view name = text("name");
    const auto in = [&](std::string_view part) { return file.find(part) != std::string::npos; };
    if (category.empty()) {
      const bool in_fsdp = in("distributed/fsdp/") || in("_fully_shard");
      if (in_fsdp && name.find("all_gather") != std::string_view::npos) {
        category = "all_gather";
      } else if (in_fsdp && name.find("reduce") != std::string_view::npos) {
        category = "reduce_scatter";
      } else if (in_fsdp && name.find("unshard") != std::string_view::npos) {
        category = "unsharded_parameter";
      } else if (in("torch/optim/")) {
        category = "optimizer";
      } else if (in("torch/autograd/") || in("torch/_tensor.py")) {
        category = "backward";
      } else if (in("torch/nn/modules/module.py")) {
        category = "forward";
      }
    }
    const bool is_torch = in("/torch/") || file == "??" || file.empty();
    if (site.empty() && !is_torch) {
      const Ref line = pickle_.Find(frame, "line");
      const std::size_t slash = file.rfind('/');
      site = std::string(slash == std::string_view::npos ? file : file.substr(slash + 1)) + ':' +
             (line != Pickle::kNothing && pickle_.KindOf(line) == Kind::kInt
                  ? std::to_string(pickle_.IntOf(line))
                  : "?") +
             ' ' + std::string(name);
    }
  }

  std::string file_;
  Pickle pickle_;
  std::map<std::int64_t, DeviceSnapshot> devices_;
  std::vector<std::string> notes_;
  std::int64_t visits_ = 0;
  std::int64_t first_time_ = 0;
};

}  // namespace

MemorySnapshot ReadMemorySnapshot(const std::string& file) {
  return SnapshotReader(file).Run();
}

}  // namespace shardwright
