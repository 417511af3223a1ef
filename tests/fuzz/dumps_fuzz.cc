// Folders of dumps of the Flight Recorder: up to four ranks, whose groups and calls fit together or
// nearly so, as pickles or JSON; then what `shardwright hang` says of them.

#include "analysis/hang.h"
#include "tests/fuzz/choices.h"
#include "traces/flight_recorder.h"

namespace shardwright::fuzz {
namespace {

constexpr int kRanks = 4;

// The same document in the two forms that dumps have.
class Writer {
 public:
  explicit Writer(bool is_json) : is_json_(is_json), text_(is_json ? "" : "\x80\x02") {}

  void Open(bool is_list) {
    Separate();
    text_ += is_json_ ? (is_list ? "[" : "{") : (is_list ? "](" : "}(");
    open_.push_back(is_list);
    is_first_ = true;
  }
  void Close() {
    text_ += is_json_ ? (open_.back() ? "]" : "}") : (open_.back() ? "e" : "u");
    open_.pop_back();
    is_first_ = false;
  }
  void Key(const std::string& key) {
    Text(key);
    text_ += is_json_ ? ":" : "";
    is_first_ = true;
  }
  void Text(const std::string& text) {
    Separate();
    const std::string size = {static_cast<char>(text.size()), 0, 0, 0};
    text_ += is_json_ ? '"' + text + '"' : 'X' + size + text;
  }
  void Number(std::int64_t number) {
    Separate();
    text_ += is_json_ ? std::to_string(number) : "I" + std::to_string(number) + "\n";
  }
  std::string Finish() { return text_ + (is_json_ ? "" : "."); }

 private:
  void Separate() {
    text_ += is_json_ && !is_first_ ? "," : "";
    is_first_ = false;
  }

  bool is_json_;
  bool is_first_ = true;
  std::string text_;
  std::string open_;
};

void WriteCall(Choices& choices, Writer& out, std::int64_t number) {
  out.Open(false);
  out.Key("profiling_name");
  out.Text(choices.Near("nccl:_all_gather_base",
                        {"nccl:_reduce_scatter_base", "nccl:all_reduce", "nccl:send 0->1", "x"}));
  out.Key("process_group");
  out.Open(true);
  out.Text(choices.Near("0", {"1", ""}));
  out.Text(choices.Near("default_pg", {"mesh_shard", ""}));
  out.Close();
  out.Key("collective_seq_id");
  out.Number(choices.Near(number));
  for (const char* key : {"input_sizes", "output_sizes"}) {
    out.Key(key);
    out.Open(true);
    out.Open(true);
    out.Number(choices.Near(40));
    out.Close();
    out.Close();
  }
  for (const char* key : {"time_created_ns", "time_discovered_started_ns"}) {
    out.Key(key);
    out.Number(choices.Near(1'700'000'000'000'000'000 + number));
  }
  out.Key("state");
  out.Text(choices.Near("completed", {"scheduled", "started"}));
  out.Key("is_p2p");
  out.Number(choices.Byte() > 240 ? 1 : 0);
  out.Key("frames");
  out.Open(true);
  out.Open(false);
  out.Key("name");
  out.Text(choices.Near("forward", {"main", ""}));
  out.Key("filename");
  out.Text("/src/net.py");
  out.Key("line");
  out.Number(choices.Near(15));
  out.Close();
  out.Close();
  out.Close();
}

std::string MakeDump(Choices& choices) {
  Writer out(choices.Byte() % 2 == 0);
  out.Open(false);
  out.Key("version");
  out.Text(choices.Near("2.4", {"2.0", "1.0"}));
  out.Key("pg_config");
  out.Open(false);
  for (const char* group : {"0", "1"}) {
    out.Key(group);
    out.Open(false);
    out.Key("name");
    out.Text(choices.Near(group, {"0", ""}));
    out.Key("desc");
    out.Text("default_pg");
    out.Key("ranks");
    out.Text(choices.Near("[0, 1, 2, 3]", {"[0, 1]", "[]", "[9999999]", "x"}));
    out.Close();
  }
  out.Close();
  out.Key("entries");
  out.Open(true);
  constexpr std::int64_t kMostCalls = 6;
  const std::int64_t calls = choices.Below(kMostCalls);
  for (std::int64_t i = 0; i < calls; ++i) {
    WriteCall(choices, out, i + 1);
  }
  out.Close();
  out.Close();
  std::string text = out.Finish();
  if (choices.Byte() > 220) {  // one byte is another one
    text[choices.Byte() * text.size() / 256] = static_cast<char>(choices.Byte());
  }
  return text;
}

}  // namespace

void Read(std::string_view bytes) {
  static const std::string folder = FolderInMemory("dumps");
  Choices choices(bytes);
  const std::int64_t ranks = 1 + choices.Below(kRanks);
  for (std::int64_t rank = 0; rank < kRanks; ++rank) {
    const std::string file = folder + "/nccl_trace_rank_" + std::to_string(rank);
    if (rank < ranks) {
      Put(file, MakeDump(choices));
    } else {
      (void)::unlink(file.c_str());
    }
  }
  (void)DiagnoseHang(ReadFlightDumps({folder}), nullptr, {});
}

}  // namespace shardwright::fuzz
