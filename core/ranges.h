#pragma once

// The standard algorithms over whole lists, as LLVM and Abseil have them: a list stands for two
// iterators, and `of` (a member or a function) names what counts of each entry. Brings <algorithm>.
//
//   IsIn(units, "lm_head", &UnitPlan::name)   // is there a unit of that name?
//   StableSortBy(tried, &Candidate::step_time)
//   Mapped<std::string>(units, &UnitPlan::name)

#include <algorithm>
#include <functional>
#include <iterator>
#include <utility>
#include <vector>

namespace shardwright {

// The first entry for which `holds`; the list's end where there is none.
template <class List, class Holds>
[[nodiscard]] auto FindIf(List&& list, Holds holds) {
  return std::find_if(std::begin(list), std::end(list), std::move(holds));
}
template <class List, class Value, class Of = std::identity>
[[nodiscard]] auto FindIn(List&& list, const Value& value, Of of = {}) {
  return FindIf(list, [&](const auto& entry) { return std::invoke(of, entry) == value; });
}

template <class List, class Holds>
[[nodiscard]] bool AnyOf(const List& list, Holds holds) {
  return FindIf(list, [&](const auto& entry) { return std::invoke(holds, entry); }) !=
         std::end(list);
}
template <class List, class Holds>
[[nodiscard]] bool NoneOf(const List& list, Holds holds) {
  return !AnyOf(list, holds);
}
template <class List, class Holds>
[[nodiscard]] bool AllOf(const List& list, Holds holds) {
  return NoneOf(list, [&](const auto& entry) { return !std::invoke(holds, entry); });
}
template <class List, class Value, class Of = std::identity>
[[nodiscard]] bool IsIn(const List& list, const Value& value, Of of = {}) {
  return FindIn(list, value, of) != std::end(list);
}

template <class List, class Holds>
[[nodiscard]] auto CountIf(const List& list, Holds holds) {
  return std::count_if(std::begin(list), std::end(list),
                       [&](const auto& entry) { return std::invoke(holds, entry); });
}
template <class List, class Value, class Of = std::identity>
[[nodiscard]] auto CountOf(const List& list, const Value& value, Of of = {}) {
  return CountIf(list, [&](const auto& entry) { return std::invoke(of, entry) == value; });
}

template <class List, class Less = std::less<>>
void SortAll(List&& list, Less less = {}) {
  std::sort(std::begin(list), std::end(list), less);
}
template <class List, class Less = std::less<>>
void StableSort(List&& list, Less less = {}) {
  std::stable_sort(std::begin(list), std::end(list), less);
}
template <class List, class Of, class Less = std::less<>>
void SortBy(List&& list, Of of, Less less = {}) {
  SortAll(list, [&](const auto& a, const auto& b) {
    return less(std::invoke(of, a), std::invoke(of, b));
  });
}
template <class List, class Of, class Less = std::less<>>
void StableSortBy(List&& list, Of of, Less less = {}) {
  StableSort(list, [&](const auto& a, const auto& b) {
    return less(std::invoke(of, a), std::invoke(of, b));
  });
}

// What `of` makes of each entry, and the sum of that from the first on.
template <class T, class List, class Of>
[[nodiscard]] std::vector<T> Mapped(const List& list, Of of) {
  std::vector<T> made;
  made.reserve(std::size(list));
  for (const auto& entry : list) {
    made.emplace_back(std::invoke(of, entry));
  }
  return made;
}
template <class T, class List, class Of = std::identity>
[[nodiscard]] T Summed(const List& list, Of of = {}) {
  T sum(0);
  for (const auto& entry : list) {
    sum += std::invoke(of, entry);
  }
  return sum;
}

}  // namespace shardwright
