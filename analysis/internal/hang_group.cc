#include "analysis/internal/hang_group.h"

#include <memory>
#include <set>
#include <span>
#include <string>
#include <utility>

#include "analysis/internal/hang_guide.h"
#include "analysis/internal/hang_order.h"
#include "core/ranges.h"

namespace shardwright::internal {
namespace {

// Ranks that issued the same.
struct Variant {
  HangCall call;
  std::vector<const RankCalls*> members;
};

std::vector<std::int64_t> RanksOf(const std::vector<const RankCalls*>& members) {
  return Mapped<std::int64_t>(members, [&](const RankCalls* member) { return member->rank; });
}

// The diagnosis of one process group.
class GroupDoctor {
 public:
  GroupDoctor(GroupCalls group, const Program* program, std::int64_t patience)
      : group_(std::move(group)), patience_(patience) {
    for (const RankCalls& member : group_.members) {
      if (!member.calls.empty()) {
        begin_ = std::max(begin_, member.first);
        end_ = std::max(end_, member.Last());
      }
    }
    guide_ = std::make_unique<HangGuide>(program, group_, begin_ == 1);
  }

  [[nodiscard]] bool HasPlan() const { return guide_->HasPlan(); }
  [[nodiscard]] std::int64_t alike() const { return alike_; }

  std::vector<HangFinding> Run() {
    for (std::int64_t at = begin_; at <= end_; ++at) {
      const std::vector<Variant> variants = VariantsAt(at);
      if (variants.size() > 1) {
        FindDifferences(at, variants);
        return std::move(findings_);
      }
      const std::size_t there = variants.empty() ? 0 : variants[0].members.size();
      if (there < group_.members.size()) {
        if (NextToEnd() < at) {
          FindAllWait();  // the others only queued more behind it
        }
        if (findings_.empty()) {
          FindLate(at, variants[0]);
        }
        return std::move(findings_);
      }
      ++alike_;
    }
    if (group_.members.size() < group_.ranks.size()) {
      FindUnplanned();
    } else {
      FindAllWait();
    }
    return std::move(findings_);
  }

  // The collective that somebody waits for: where the others are when a rank has died.
  [[nodiscard]] HangFinding Waiting() const {
    const std::int64_t at = NextToEnd();
    HangFinding finding = Begin(HangKind::kNoDump, at);
    for (const RankCalls& member : group_.members) {
      if (member.Has(at) && !member.IsComplete(at)) {
        finding.waiting.push_back(member.rank);
        finding.expected = guide_->Named(member.At(at), PrefixOf(member, at));
        finding.since = std::max(finding.since, member.At(at).created);
      }
    }
    return finding;
  }

 private:
  // The first that has not ended; where the dumps do not tell what ended, the last one.
  [[nodiscard]] std::int64_t NextToEnd() const {
    for (std::int64_t at = end_ - 1; at >= begin_; --at) {
      if (AnyOf(group_.members,
                [&](const RankCalls& member) { return member.Has(at) && member.IsComplete(at); })) {
        return at + 1;
      }
    }
    return end_;
  }

  [[nodiscard]] HangFinding Begin(HangKind kind, std::int64_t sequence) const {
    HangFinding finding;
    finding.kind = kind;
    finding.group = group_.name;
    finding.group_size = group_.ranks.size();
    finding.expected.sequence = sequence;
    return finding;
  }

  [[nodiscard]] std::vector<Variant> VariantsAt(std::int64_t at) const {
    std::vector<Variant> variants;
    for (const RankCalls& member : group_.members) {
      if (!member.Has(at)) {
        continue;
      }
      const auto alike = FindIf(
          variants, [&](const Variant& other) { return AreAlike(other.call, member.At(at)); });
      if (alike == variants.end()) {
        variants.push_back({member.At(at), {&member}});
      } else {
        alike->members.push_back(&member);
      }
    }
    return variants;
  }

  [[nodiscard]] std::span<const HangCall> PrefixOf(const RankCalls& member, std::int64_t at) const {
    const std::int64_t count =
        std::clamp<std::int64_t>(at - member.first, 0, std::ssize(member.calls));
    return std::span<const HangCall>(member.calls).first(static_cast<std::size_t>(count));
  }

  // Which variant is right, or none.
  [[nodiscard]] const Variant* RightOf(const std::vector<Variant>& variants,
                                       std::int64_t at) const {
    const std::span<const HangCall> before = PrefixOf(*variants[0].members[0], at);
    const auto variant_like = [&](const HangCall& call) {
      const auto it =
          FindIf(variants, [&](const Variant& variant) { return AreAlike(variant.call, call); });
      return it == variants.end() ? nullptr : &*it;
    };
    std::set<const Variant*> planned;
    if (HasPlan()) {
      for (const StepPlace& place : guide_->Places(before)) {
        planned.insert(variant_like(guide_->step()[place.index]));
      }
    }
    planned.erase(nullptr);
    if (planned.size() == 1) {
      return *planned.begin();
    }
    for (const Variant& variant : variants) {
      if (2 * variant.members.size() > group_.members.size()) {
        return &variant;
      }
    }
    const std::vector<HangCall> usual = ContinuationOf(before, 1);
    return usual.empty() ? nullptr : variant_like(usual[0]);
  }

  void FindDifferences(std::int64_t at, const std::vector<Variant>& variants) {
    const Variant* right = RightOf(variants, at);
    const Variant& reference = right == nullptr ? variants[0] : *right;
    const RankCalls& member = *reference.members[0];
    const std::span<const HangCall> before = PrefixOf(member, at);
    std::vector<HangCall> expected(member.calls.begin() + (at - member.first), member.calls.end());
    const std::vector<HangCall> ahead = guide_->Ahead(member.calls);
    expected.insert(expected.end(), ahead.begin(), ahead.end());
    for (const Variant& variant : variants) {
      if (&variant == &reference) {
        continue;
      }
      HangFinding finding = Begin(HangKind::kUndecided, at);
      finding.expected = guide_->Named(reference.call, before);
      finding.ranks = RanksOf(variant.members);
      finding.waiting = RanksOf(reference.members);
      finding.since = reference.call.created;
      finding.found = guide_->Named(variant.call, before);
      if (at > begin_) {
        finding.last =
            guide_->Named(variant.members[0]->At(at - 1), before.first(before.size() - 1));
      }
      if (right != nullptr) {
        Classify(*variant.members[0], at, expected, ahead.size(), finding);
      }
      findings_.push_back(std::move(finding));
    }
  }

  // Whether the rank's calls from the `first` on are the others' that come `shift` later.
  static bool Follows(const RankCalls& member, std::int64_t at,
                      const std::vector<HangCall>& expected, std::int64_t first,
                      std::int64_t shift) {
    constexpr std::int64_t kMost = 8;
    for (std::int64_t i = first; i < std::min(kMost, std::ssize(expected) - 1); ++i) {
      if (member.Has(at + i) &&
          !AreAlike(member.At(at + i), expected[static_cast<std::size_t>(i + shift)])) {
        return false;
      }
    }
    return true;
  }

  // Whether what the rank queued behind contradicts a swap, AG RS AG RS against RS AG RS AG, or a
  // call more: it is the others' without their first, or with another one in its place.
  static bool IsNeitherSwapNorExtra(const RankCalls& member, std::int64_t at,
                                    const std::vector<HangCall>& expected) {
    return (Follows(member, at, expected, 0, 1) && !Follows(member, at, expected, 2, 0)) ||
           (Follows(member, at, expected, 1, 0) && !Follows(member, at, expected, 1, -1));
  }

  // What became of `expected`, of which the last `ahead` are not issued yet, on a rank that issued
  // something else.
  void Classify(const RankCalls& member, std::int64_t at, const std::vector<HangCall>& expected,
                std::size_t ahead, HangFinding& finding) const {
    const HangCall& own = member.At(at);
    const HangCall* next = member.Has(at + 1) ? &member.At(at + 1) : nullptr;
    HangCall alike = own;
    alike.dtype.clear();
    if (AreAlike(alike, expected[0])) {
      finding.kind = HangKind::kOtherDtype;
      return;
    }
    // What is made up for later has the stack of that later phase.
    HangCall later = next == nullptr ? HangCall{} : *next;
    later.phase = HangPhase::kUnknown;
    if (next != nullptr && AreAlike(later, expected[0]) &&
        !IsNeitherSwapNorExtra(member, at, expected)) {
      const bool is_next = expected.size() > 1 && AreAlike(own, expected[1]);
      finding.kind = is_next ? HangKind::kSwapped : HangKind::kExtra;
      if (is_next) {
        NameFound(member, at, expected, 1, finding);
      }
      return;
    }
    for (std::size_t k = 1; k < expected.size(); ++k) {
      if (AreAlike(own, expected[k]) &&
          (next == nullptr || k + 1 == expected.size() || AreAlike(*next, expected[k + 1]))) {
        finding.kind = HangKind::kSkipped;
        finding.skipped = static_cast<std::int64_t>(k);
        NameFound(member, at, expected, k, finding);
        AddNeighbours(member, at, finding);
        return;
      }
    }
    if (own.op == expected[0].op) {
      finding.kind = HangKind::kOtherSize;
      return;
    }
    // Something that was not to come at all: only where it is known what was.
    const bool is_of_job = AnyOf(expected, [&](const HangCall& call) {
      return call.op == own.op && call.elements == own.elements;
    });
    const bool is_place_taken = ahead == 0 || is_of_job || own.phase == expected[0].phase;
    finding.kind = is_place_taken ? HangKind::kOtherOp : HangKind::kExtra;
  }

  // The rank issued what was to come `ahead` collectives later.
  void NameFound(const RankCalls& member, std::int64_t at, const std::vector<HangCall>& expected,
                 std::size_t ahead, HangFinding& finding) const {
    const std::span<const HangCall> before = PrefixOf(member, at);
    std::vector<HangCall> calls(before.begin(), before.end());
    calls.insert(calls.end(), expected.begin(),
                 expected.begin() + static_cast<std::ptrdiff_t>(ahead));
    finding.found = guide_->Named(member.At(at), calls);
  }

  // Collectives just before that are like the skipped one: any of them may be it.
  void AddNeighbours(const RankCalls& member, std::int64_t at, HangFinding& finding) const {
    if (finding.skipped != 1 || !HasPlan()) {
      return;
    }
    std::vector<std::string> units;
    for (const StepPlace& place : guide_->Places(PrefixOf(member, at))) {
      const HangCall& skipped = guide_->step()[place.index];
      if (!AreAlike(skipped, finding.expected)) {
        continue;
      }
      for (std::size_t i = 1; i <= place.index && at - static_cast<std::int64_t>(i) >= begin_;
           ++i) {
        const HangCall& planned = guide_->step()[place.index - i];
        if (!AreAlike(planned, skipped) || planned.micro_batch != skipped.micro_batch ||
            !AreAlike(planned, member.At(at - static_cast<std::int64_t>(i)))) {
          break;
        }
        units.insert(units.begin(), planned.units.begin(), planned.units.end());
      }
      break;
    }
    for (const std::string& unit : finding.expected.units) {
      if (!IsIn(units, unit)) {
        units.push_back(unit);
      }
    }
    finding.expected.units = std::move(units);
  }

  void FindLate(std::int64_t at, const Variant& there) {
    std::vector<const RankCalls*> late;
    std::int64_t since = 0;
    for (const RankCalls* member : there.members) {
      since = std::max(since, member->At(at).created);
      if (member->IsComplete(at)) {
        return;  // all have been there: some dumps are older than it
      }
    }
    bool is_over = true;
    for (const RankCalls& member : group_.members) {
      if (!member.Has(at) && member.written - since >= patience_) {
        late.push_back(&member);
        is_over = is_over && (member.calls.empty() || member.calls.back().is_over);
      }
    }
    if (late.empty()) {
      return;
    }
    const RankCalls& member = *there.members[0];
    const std::span<const HangCall> before = PrefixOf(member, at);
    // One against all others, who are done: it went its own way.
    const bool is_extra = is_over && late.size() > there.members.size() && at > begin_;
    HangFinding finding = Begin(is_extra ? HangKind::kExtra : HangKind::kLate, at);
    finding.expected = guide_->Named(there.call, before);
    finding.since = since;
    finding.ranks = RanksOf(is_extra ? there.members : late);
    finding.waiting = RanksOf(is_extra ? std::vector<const RankCalls*>{} : there.members);
    if (is_extra) {
      finding.found = finding.expected;
    }
    if (!late[0]->calls.empty() && at > begin_) {
      finding.last = guide_->Named(late[0]->At(at - 1), before.first(before.size() - 1));
    }
    findings_.push_back(std::move(finding));
  }

  // Some ranks left no dump: gloo ends a process that is sent more than it expects. The cause may
  // be a rank that did something else than the plan, close to the end, since collectives block.
  void FindUnplanned() {
    constexpr std::int64_t kClose = 8;
    if (!HasPlan() || group_.members.empty() || end_ < begin_) {
      return;
    }
    const RankCalls& member = group_.members[0];  // all are alike
    for (std::int64_t at = std::max(begin_, end_ - kClose); at <= end_; ++at) {
      const std::span<const HangCall> before = PrefixOf(member, at);
      const HangCall& call = member.At(at);
      const std::vector<StepPlace> places = guide_->Places(before);
      const bool is_planned = AnyOf(places, [&](const StepPlace& place) {
        return AreAlike(guide_->step()[place.index], call);
      });
      const std::vector<HangCall> ahead = guide_->Ahead(before);
      if (is_planned || (!IsInStep(guide_->step(), call) && call.op != ahead[0].op)) {
        continue;
      }
      HangFinding finding = Begin(HangKind::kOtherOp, at);
      finding.expected = ahead[0];
      finding.expected.sequence = at;
      finding.found = call;
      finding.since = call.created;
      for (const RankCalls& other : group_.members) {
        finding.ranks.push_back(other.rank);
      }
      Classify(member, at, ahead, ahead.size(), finding);
      findings_.push_back(std::move(finding));
      return;
    }
  }

  // NCCL's ranks queue collectives: the first that does not end is it, not the last. Ranks whose
  // GPU has not started it are late where it runs on others.
  void FindAllWait() {
    if (end_ < begin_) {
      return;
    }
    const std::int64_t at = NextToEnd();
    HangFinding finding = Begin(HangKind::kAllWait, at);
    for (const RankCalls& member : group_.members) {
      const HangCall& call = member.At(at);
      if (call.is_over || member.written - call.created < patience_) {
        return;
      }
      finding.since = std::max(finding.since, call.created);
      (call.is_scheduled ? finding.ranks : finding.waiting).push_back(member.rank);
    }
    const RankCalls& member = group_.members[0];
    finding.expected = guide_->Named(member.At(at), PrefixOf(member, at));
    if (!finding.ranks.empty() && !finding.waiting.empty()) {
      finding.kind = HangKind::kLate;
      finding.found = finding.expected;
    } else {
      finding.waiting.insert(finding.waiting.end(), finding.ranks.begin(), finding.ranks.end());
      finding.ranks = finding.waiting;
    }
    findings_.push_back(std::move(finding));
  }

  GroupCalls group_;
  std::int64_t patience_;
  std::int64_t begin_ = 1, end_ = 0;
  std::unique_ptr<const HangGuide> guide_;
  std::int64_t alike_ = 0;
  std::vector<HangFinding> findings_;
};

}  // namespace

GroupDiagnosis DiagnoseGroup(const GroupCalls& group, const Program* program,
                             std::int64_t patience) {
  GroupDoctor doctor(group, program, patience);
  GroupDiagnosis diagnosis;
  diagnosis.has_plan = doctor.HasPlan();
  diagnosis.findings = doctor.Run();
  diagnosis.alike = doctor.alike();
  diagnosis.waiting = doctor.Waiting();
  return diagnosis;
}

}  // namespace shardwright::internal
