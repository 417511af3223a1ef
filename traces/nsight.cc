#include "traces/nsight.h"

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string_view>
#include <unordered_map>
#include <utility>

#include <sqlite3.h>

#include "core/error.h"
#include "core/files.h"
#include "core/staged_file.h"
#include "core/threads.h"
#include "traces/internal/raw_recording.h"

namespace shardwright {
namespace {

using internal::RawRecording;
using internal::RawSpan;
using internal::RawWork;

constexpr std::string_view kExportRule = "an export of Nsight Systems (nsys export --type sqlite)";
constexpr std::int64_t kMostNames = 2'000'000;

struct Closer {
  void operator()(sqlite3* database) const { sqlite3_close(database); }
  void operator()(sqlite3_stmt* statement) const { sqlite3_finalize(statement); }
};

// The file as one that SQLite neither locks nor writes beside: of one in WAL mode it would make an
// index, through whatever link has that name.
std::string ImmutableUri(const std::string& file) {
  std::string uri = file.starts_with('/') ? "file://" : "file:";
  for (const char c : file) {
    uri += c == '%' ? "%25" : c == '?' ? "%3f" : c == '#' ? "%23" : std::string(1, c);
  }
  return uri + "?immutable=1";
}

// One row of a query. Values of other types than asked for are damage.
class Row {
 public:
  Row(const std::string& file, sqlite3_stmt* statement) : file_(file), statement_(statement) {}

  [[nodiscard]] bool IsNull(int column) const {
    return sqlite3_column_type(statement_, column) == SQLITE_NULL;
  }
  [[nodiscard]] std::int64_t Int(int column) const {
    if (sqlite3_column_type(statement_, column) != SQLITE_INTEGER) {
      throw InputError(file_ + ": " + sqlite3_column_name(statement_, column),
                       "no whole number in a row", kExportRule);
    }
    return sqlite3_column_int64(statement_, column);
  }
  [[nodiscard]] std::string_view Text(int column) const {
    if (sqlite3_column_type(statement_, column) != SQLITE_TEXT) {
      return {};
    }
    const unsigned char* text = sqlite3_column_text(statement_, column);
    return {reinterpret_cast<const char*>(text),
            static_cast<std::size_t>(sqlite3_column_bytes(statement_, column))};
  }

 private:
  const std::string& file_;
  sqlite3_stmt* statement_;
};

class Database {
 public:
  explicit Database(std::string file) : file_(std::move(file)) {
    sqlite3* raw = nullptr;
    RememberRead(file_);
    RefuseUnfinished();
    const int code = sqlite3_open_v2(ImmutableUri(file_).c_str(), &raw,
                                     SQLITE_OPEN_READONLY | SQLITE_OPEN_URI, nullptr);
    handle_.reset(raw);
    Check(code);
    // A schema may hold views and triggers of others; none of their functions is run.
    sqlite3_db_config(raw, SQLITE_DBCONFIG_TRUSTED_SCHEMA, 0, nullptr);
    sqlite3_db_config(raw, SQLITE_DBCONFIG_DEFENSIVE, 1, nullptr);
    constexpr int kLongestValue = 1 << 20;  // names of templates are long, but not that long
    sqlite3_limit(raw, SQLITE_LIMIT_LENGTH, kLongestValue);
    // Tables of rows only: virtual ones have no root page, and generated columns compute.
    ForEach(
        "SELECT name, EXISTS (SELECT 1 FROM pragma_table_xinfo(name) WHERE hidden > 0) "
        "FROM sqlite_master WHERE type = 'table' AND rootpage > 0",
        [&](const Row& row) {
          if (row.Int(1) == 0) {
            tables_.emplace(row.Text(0));
          }
        });
  }

  // Tables are created lazily, so that any may be missing.
  [[nodiscard]] bool Has(const std::string& table) const { return tables_.contains(table); }

  void ForEach(const std::string& query, const std::function<void(const Row&)>& handle) {
    sqlite3_stmt* raw = nullptr;
    Check(sqlite3_prepare_v2(handle_.get(), query.c_str(), -1, &raw, nullptr));
    const std::unique_ptr<sqlite3_stmt, Closer> statement(raw);
    int code = sqlite3_step(raw);
    for (; code == SQLITE_ROW; code = sqlite3_step(raw)) {
      ThrowIfStopped();
      handle(Row(file_, raw));
    }
    Check(code);
  }

 private:
  // Rows in a log beside the file are not in it yet, and only a writer could move them.
  void RefuseUnfinished() const {
    for (const char* ending : {"-wal", "-journal"}) {
      std::error_code ignored;
      const std::string log = std::filesystem::canonical(file_, ignored).string() + ending;
      char first = 0;  // of a header that SQLite zeroes when all is moved (journal_mode = PERSIST)
      if (IsRegularFile(log) && InputFile(log, kExportRule).Read(&first, 1) > 0 && first != 0) {
        throw InputError(file_, "rows that are still in its " + std::string(ending), kExportRule,
                         "sqlite3 FILE 'PRAGMA journal_mode = DELETE' moves them into the file");
      }
    }
  }

  void Check(int code) const {
    if (code != SQLITE_OK && code != SQLITE_DONE) {
      throw InputError(file_, std::string("an error of SQLite: ") + sqlite3_errmsg(handle_.get()),
                       kExportRule);
    }
  }

  std::string file_;
  std::unique_ptr<sqlite3, Closer> handle_;
  std::set<std::string> tables_;
};

class ExportReader {
 public:
  explicit ExportReader(const std::string& file)
      : database_(file),
        raw_(file, "nsight"),
        strings_(file),
        rows_of_names_(file, "rows of StringIds", kMostNames) {}

  ProfilerRecording Run() {
    RequireTables();
    ReadNames();
    ReadKernels();
    ReadCopies();
    if (database_.Has("CUPTI_ACTIVITY_KIND_RUNTIME")) {
      database_.ForEach("SELECT start, \"end\", correlationId FROM CUPTI_ACTIVITY_KIND_RUNTIME",
                        [&](const Row& row) {
                          const RawSpan span = SpanOf(row);
                          raw_.rows.Take();
                          raw_.launches.push_back({row.Int(2), span.begin, span.end});
                          ++raw_.events;
                        });
    }
    if (database_.Has("NVTX_EVENTS")) {
      ReadRanges();
    }
    return internal::Resolve(std::move(raw_));
  }

 private:
  void RequireTables() const {
    std::string missing;
    for (const char* table : {"CUPTI_ACTIVITY_KIND_KERNEL", "StringIds"}) {
      if (!database_.Has(table)) {
        missing += (missing.empty() ? "" : ", ") + std::string(table);
      }
    }
    if (!missing.empty()) {
      throw InputError(raw_.file, "no table " + missing, kExportRule,
                       "were kernels recorded (nsys profile --trace cuda,nvtx)?");
    }
  }

  // Columns 0 and 1.
  [[nodiscard]] RawSpan SpanOf(const Row& row) const {
    RawSpan span;
    span.begin = row.Int(0);
    span.end = row.Int(1);
    constexpr std::int64_t kMost = INT64_MAX / 4;
    if (span.begin < -kMost || span.end > kMost || span.end < span.begin) {
      throw InputError(raw_.file, "a row that ends before it begins", kExportRule);
    }
    return span;
  }

  std::uint32_t NumberOf(std::pair<std::int64_t, std::int64_t> key) {
    return queues_.emplace(key, static_cast<std::uint32_t>(queues_.size())).first->second;
  }

  // Not joined by the database: its table need not have an index, nor unique ids. The first of
  // equal ids counts.
  void ReadNames() {
    database_.ForEach("SELECT id, value FROM StringIds", [&](const Row& row) {
      rows_of_names_.Take();
      names_.emplace(row.Int(0), strings_.Find(row.Text(1)));
    });
  }

  // The text of an id in `column`; empty without one.
  [[nodiscard]] std::string_view NameOf(const Row& row, int column) const {
    const auto found = row.IsNull(column) ? names_.end() : names_.find(row.Int(column));
    return found == names_.end() ? std::string_view() : strings_.names()[found->second];
  }

  void ReadKernels() {
    database_.ForEach(
        "SELECT start, \"end\", deviceId, streamId, correlationId, shortName "
        "FROM CUPTI_ACTIVITY_KIND_KERNEL",
        [&](const Row& row) {
          raw_.rows.Take();
          RawWork work;
          work.span = SpanOf(row);
          const std::string_view name = NameOf(row, 5);
          work.span.name = raw_.names.Find(name);
          work.span.thread = NumberOf({row.Int(2), row.Int(3)});
          work.correlation = row.Int(4);
          if (const auto code = internal::CollectiveOfKernel(name)) {
            work.kind = ActivityKind::kCollective;
            work.collective = *code;
          }
          raw_.work.push_back(work);
          ++raw_.events;
        });
  }

  void ReadCopies() {
    if (!database_.Has("CUPTI_ACTIVITY_KIND_MEMCPY")) {
      return;
    }
    database_.ForEach(
        "SELECT start, \"end\", deviceId, streamId, correlationId, bytes, copyKind "
        "FROM CUPTI_ACTIVITY_KIND_MEMCPY",
        [&](const Row& row) {
          raw_.rows.Take();
          RawWork work;
          work.span = SpanOf(row);
          work.span.name = raw_.names.Find("memcpy");
          work.span.thread = NumberOf({row.Int(2), row.Int(3)});
          work.correlation = row.Int(4);
          constexpr std::int64_t kMostBytes = std::int64_t{1} << 50;
          work.bytes = Bytes(std::clamp<std::int64_t>(row.Int(5), 0, kMostBytes));
          // CUpti_ActivityMemcpyKind
          work.kind = row.Int(6) == 1   ? ActivityKind::kToDevice
                      : row.Int(6) == 2 ? ActivityKind::kToHost
                                        : ActivityKind::kWithinDevice;
          raw_.work.push_back(work);
          ++raw_.events;
        });
  }

  void ReadRanges() {
    constexpr std::int64_t kPushPop = 59, kStartEnd = 60;
    database_.ForEach("SELECT start, \"end\", eventType, globalTid, text, textId FROM NVTX_EVENTS",
                      [&](const Row& row) {
                        raw_.rows.Take();
                        ++raw_.events;
                        if (row.IsNull(1) || row.IsNull(3) ||
                            (row.Int(2) != kPushPop && row.Int(2) != kStartEnd)) {
                          return;
                        }
                        // emit_nvtx appends ", seq = 12" and the like.
                        std::string_view name = row.IsNull(4) ? NameOf(row, 5) : row.Text(4);
                        name = name.substr(0, std::min(name.find(", seq"), name.find(", op_id")));
                        if (!internal::IsMarker(name)) {
                          return;
                        }
                        RawSpan span = SpanOf(row);
                        span.thread = NumberOf({-1, row.Int(3)});
                        span.name = raw_.names.Find(name);
                        raw_.ranges.push_back(span);
                      });
  }

  Database database_;
  RawRecording raw_;
  internal::NameTable strings_;  // of StringIds
  Budget rows_of_names_;
  std::unordered_map<std::int64_t, std::uint32_t> names_;
  std::map<std::pair<std::int64_t, std::int64_t>, std::uint32_t> queues_;
};

}  // namespace

ProfilerRecording ReadNsight(const std::string& file) {
  return ExportReader(file).Run();
}

}  // namespace shardwright
