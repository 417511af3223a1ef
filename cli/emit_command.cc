#include <filesystem>

#include <nlohmann/json.hpp>

#include "cli/command.h"
#include "cli/flow.h"
#include "cli/named_files.h"
#include "cli/table.h"
#include "core/files.h"
#include "core/json.h"
#include "core/printable.h"
#include "core/ranges.h"
#include "core/writable.h"
#include "planner/emitters/emitters.h"
#include "planner/evaluate.h"

namespace shardwright {

namespace {

using Json = nlohmann::ordered_json;
using enum Table::Align;

const Emitter& FindEmitter(const Flag& flag) {
  std::vector<std::string_view> names = Mapped<std::string_view>(Emitters(), &Emitter::name);
  return Emitters()[ReadChoice(flag, names)];
}

// A target of one file takes a file name; "DIR/" and folders that exist take any.
bool TakesFolder(const Emission& emission, const std::string& output) {
  return output.ends_with('/') || IsFolder(output) || emission.files.size() > 1;
}

// Where each file goes.
std::vector<std::string> PathsOf(const Emission& emission, const std::string& output) {
  if (!TakesFolder(emission, output)) {
    return {output};
  }
  std::vector<std::string> paths =
      Mapped<std::string>(emission.files, [&](const EmittedFile& file) {
        return (std::filesystem::path(output) / file.name).string();
      });
  return paths;
}

// All of what is asked for, or nothing.
void WriteFiles(const Emission& emission, const std::vector<std::string>& paths, bool is_folder,
                const std::string& as_emitted) {
  std::vector<OutputFile> files;
  std::vector<NamedFile> names;
  for (std::size_t i = 0; i < paths.size(); ++i) {
    files.push_back({paths[i], emission.files[i].text, is_folder});
    names.push_back({"--output", paths[i]});
  }
  if (!as_emitted.empty() && as_emitted != "-") {
    files.push_back({as_emitted, PlanFileJson(emission.as_emitted)});
    names.push_back({"--as-emitted", as_emitted});
  }
  RefuseOverwriting(names);
  WriteFilesAtomically(files);
}

std::string ChangeByEmission(double before, double after) {
  return before <= 0.0 || before == after ? "" : SignedPercent(after / before - 1.0);
}

std::string OutcomeTable(const Outcome& a, const Outcome& b) {
  Table table({kLeft, kRight, kRight, kRight});
  table.Row({"", "planned", "as emitted", ""});
  const auto time = [&](const char* name, Seconds before, Seconds after) {
    table.Row({name, Format(before), Format(after), ChangeByEmission(before.value, after.value)});
  };
  const auto bytes = [&](const char* name, Bytes before, Bytes after) {
    table.Row(
        {name, Format(before), Format(after),
         ChangeByEmission(static_cast<double>(before.value), static_cast<double>(after.value))});
  };
  time("step time", a.step_time, b.step_time);
  time("exposed communication", a.exposed_comm, b.exposed_comm);
  bytes("peak allocated", a.device_peak.total, b.device_peak.total);
  bytes("reserved + outside", a.DeviceTotal(), b.DeviceTotal());
  return table.Text(2);
}

std::string LossText(const Loss& loss) {
  std::string text = "  " + loss.field;
  if (!loss.subject.empty()) {
    text += " of " + loss.subject;
  }
  text += ": " + loss.planned + " -> " + loss.emitted + " (" + loss.why + ")";
  return PrintableLine(text) + "\n";
}

std::string ReportText(const PlanFile& file, const Emitter& emitter, const Emission& emission,
                       const Outcome& planned, const Outcome& emitted) {
  std::string text = TitleOf(file) + ", emitted for " + std::string(emitter.name) + "\n";
  if (emission.losses.empty()) {
    text += "\nThe framework can run it as planned.\n";
  } else {
    text += "\nThe framework will run differently:\n";
    for (const Loss& loss : emission.losses) {
      text += LossText(loss);
    }
  }
  if (!emission.by_hand.empty()) {
    text += "\nLeft to you:\n";
    for (const std::string& line : emission.by_hand) {
      text += "  " + PrintableLine(line) + "\n";
    }
  }
  text += "\n" + OutcomeTable(planned, emitted);
  for (const Misfit& misfit : emitted.misfits) {
    text += "As emitted it " + PrintableLine(misfit.text) + "\n";
  }
  return text;
}

Json OutcomeJson(const Outcome& outcome) {
  Json json;
  json["step_time_s"] = outcome.step_time.value;
  json["exposed_comm_s"] = outcome.exposed_comm.value;
  json["tokens_per_s_per_gpu"] = outcome.rates.tokens_per_second_per_gpu;
  json["peak_allocated_bytes"] = outcome.device_peak.total.value;
  json["peak_reserved_bytes"] = outcome.reserved.value;
  json["outside_allocator_bytes"] = outcome.outside.value;
  json["fits"] = outcome.Fits();
  json["misfits"] =
      Mapped<Json>(outcome.misfits, [&](const Misfit& misfit) { return misfit.text; });
  return json;
}

std::string ReportJson(const Emitter& emitter, const Emission& emission,
                       const std::vector<std::string>& paths, const Outcome& planned,
                       const Outcome& emitted) {
  Json json = ReportHead("shardwright-emission");
  json["target"] = emitter.name;
  json["files"] = Json::array();
  for (std::size_t i = 0; i < emission.files.size(); ++i) {
    Json file = {{"name", emission.files[i].name}};
    if (paths.empty()) {
      file["text"] = emission.files[i].text;
    } else {
      file["path"] = paths[i];
    }
    json["files"].push_back(file);
  }
  json["is_exact"] = emission.losses.empty();
  json["losses"] = Mapped<Json>(emission.losses, [&](const Loss& loss) -> Json {
    return {{"field", loss.field},
            {"subject", loss.subject},
            {"planned", loss.planned},
            {"emitted", loss.emitted},
            {"why", loss.why}};
  });
  json["by_hand"] = emission.by_hand;
  json["planned"] = OutcomeJson(planned);
  json["as_emitted"] = OutcomeJson(emitted);
  return json.dump(2) + "\n";
}

}  // namespace

int EmitCommand(const Arguments& arguments) {
  arguments.Require("--to");
  const Emitter& emitter = FindEmitter(arguments.Get("--to"));
  EmitOptions options;
  arguments.SetText("--script", options.script);
  arguments.SetChoice("--fqns", kFqnDialectNames, options.fqns);
  const std::string output = arguments.Get("--output").text;
  const std::string as_emitted = arguments.Get("--as-emitted").text;
  const bool prints_files = output.empty() || output == "-";
  if (as_emitted == "-" && (prints_files || arguments.IsJson())) {
    throw UsageError("--as-emitted -: standard output has the " +
                     std::string(arguments.IsJson() ? "report" : "emitted file") + " already");
  }
  const PlanFile file = ReadPlanFile(arguments.Get("PLAN").text, arguments.streams);
  CheckEmittable(file, arguments.Get("PLAN").text, emitter.name);
  const Emission emission = Emit(emitter, file, options);
  CheckPlan(emission.as_emitted, emission.as_emitted.plan, "the plan as emitted");
  WarnOf(emission.as_emitted);
  if (prints_files && !arguments.IsJson() && emission.files.size() > 1) {
    throw UsageError("--to " + std::string(emitter.name) +
                     " writes several files, so it needs -o FOLDER or --json");
  }
  const Outcome planned = Evaluate(file, file.plan);
  const Outcome emitted =
      emission.losses.empty() ? planned : Evaluate(emission.as_emitted, emission.as_emitted.plan);
  const bool writes = emission.losses.empty() || !arguments.Has("--exact");
  std::vector<std::string> paths;
  if (writes && !prints_files) {
    paths = PathsOf(emission, output);
  }
  if (writes) {
    WriteFiles(emission, paths, TakesFolder(emission, output), as_emitted);
  }
  if (arguments.IsJson()) {
    arguments.Print(ReportJson(emitter, emission, paths, planned, emitted));
  } else {
    std::string report = ReportText(file, emitter, emission, planned, emitted);
    for (const std::string& path : paths) {
      report += "Wrote " + path + "\n";
    }
    if (paths.empty() && writes) {
      arguments.PrintFile(emission.files[0].text, report);
    } else if (as_emitted == "-" && writes) {
      arguments.PrintFile(PlanFileJson(emission.as_emitted), report);
    } else {
      arguments.Print(report);
    }
  }
  return writes && emitted.Fits() ? kExitOk : kExitNo;
}

}  // namespace shardwright
