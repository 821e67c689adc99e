#include "tests/conformance/runner.hpp"

#include <fnmatch.h>
#include <poll.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "tests/conformance/far.hpp"
#include "tests/conformance/role.hpp"

namespace vrdma::conformance {
namespace {

using Clock = std::chrono::steady_clock;

struct Pair {
  std::vector<std::unique_ptr<Role>> roles;  // a, then b unless solo
};

Pair start_pair(bool solo, const RunnerOptions& options) {
  Pair pair;
  if (solo) {
    pair.roles.push_back(std::make_unique<RoleProcess>(true, -1, options.settings));
    return pair;
  }
  PacketPair ends;
  pair.roles.push_back(std::make_unique<RoleProcess>(true, ends.one.get(), options.settings));
  if (options.far)
    pair.roles.push_back(std::make_unique<FarRole>(*options.far, std::move(ends.other)));
  else
    pair.roles.push_back(std::make_unique<RoleProcess>(false, ends.other.get(), options.settings));
  return pair;
}

// Sleeps until something happens to one of the processes or the time is over; false when it is over.
template <class Done>
bool wait_for(Pair& pair, Clock::time_point end, Done done) {
  for (;;) {
    std::vector<pollfd> fds;
    bool finished = true;
    for (auto& role : pair.roles) {
      role->look();
      finished = finished && done(*role);
      role->add_to(fds);
    }
    if (finished) return true;
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now()).count();
    if (left <= 0) return false;
    // A kernel without pidfd_open still gets its dead noticed by the period.
    ::poll(fds.data(), fds.size(), static_cast<int>(std::min<long long>(left + 1, 100)));
  }
}

void judge(const Pair& pair, bool in_time, int timeout_s, Result& result) {
  bool failed = false;
  bool skipped = false;
  std::string detail;
  const auto add = [&](const Role& role, const std::string& line) {
    if (!detail.empty()) detail += "\n    ";
    if (pair.roles.size() > 1) detail += &role == pair.roles[0].get() ? "[a] " : "[b] ";
    detail += line;
  };
  for (const auto& role : pair.roles) {
    const std::string& death = role->death();
    if (role->reported() && role->report().verdict == Verdict::failed) {
      failed = true;
      add(*role, role->report().text);
    } else if (role->reported() && role->report().verdict == Verdict::skipped) {
      skipped = true;
      add(*role, role->report().text);
    } else if (!death.empty()) {
      failed = true;
      add(*role, text(death, ", last at ", role->place()));
    } else if (!role->reported()) {
      failed = true;
      add(*role, role->gone() ? text("left without a verdict, last at ", role->place())
                              : text("hung, killed after ", timeout_s, " s, last at ", role->place()));
    } else if (!in_time && !role->gone()) {
      failed = true;
      add(*role, text("gave its verdict but did not exit within ", timeout_s, " s"));
    }
  }
  const bool abandoned = std::any_of(pair.roles.begin(), pair.roles.end(), [](const auto& role) {
    return role->reported() && role->report().verdict == Verdict::peer_ended;
  });
  if (abandoned && !failed && !skipped) {
    failed = true;
    detail = "one role lost the other, which gave no reason";
  }
  result.outcome = failed ? Outcome::failed : skipped ? Outcome::skipped : Outcome::passed;
  result.detail = std::move(detail);
}

void print(const Result& result) {
  const char* word = result.outcome == Outcome::passed ? "PASS" : result.outcome == Outcome::failed ? "FAIL" : "SKIP";
  std::printf("%s  %-64s %7.2f s", word, result.name.c_str(), result.seconds);
  if (!result.detail.empty()) std::printf("\n    %s", result.detail.c_str());
  if (result.outcome == Outcome::failed) {
    std::printf("\n    again: --filter %s --seed %llu", result.name.c_str(), static_cast<unsigned long long>(result.seed));
  }
  std::printf("\n");
  std::fflush(stdout);
}

std::string quoted(const std::string& in) {
  std::string out = "\"";
  for (const char c : in) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof(escape), "\\u%04x", static_cast<unsigned>(c));
      out += escape;
    } else {
      out += c;
    }
  }
  return out + '"';
}

// Numbers of the tests to run, in order.
std::vector<std::size_t> chosen_tests(const RunnerOptions& options) {
  std::vector<std::size_t> chosen;
  for (std::size_t index = 0; index < registry().size(); ++index) {
    const Test& test = registry()[index];
    if (::fnmatch(options.filter.c_str(), test.name, 0) != 0) continue;
    if (std::any_of(options.except.begin(), options.except.end(),
                    [&](const std::string& glob) { return ::fnmatch(glob.c_str(), test.name, 0) == 0; })) {
      continue;
    }
    if (options.far && test.options.solo) continue;  // has no two sides
    chosen.push_back(index);
  }
  if (options.sample == 0) return chosen;
  std::erase_if(chosen, [&](std::size_t index) { return registry()[index].options.slow && !options.slow; });
  Rng rng(options.seed);
  while (chosen.size() > options.sample) chosen.erase(chosen.begin() + static_cast<std::ptrdiff_t>(rng.below(chosen.size())));
  return chosen;
}

}  // namespace

std::vector<Result> run_tests(const RunnerOptions& options) {
  std::vector<Result> results;
  const std::vector<std::size_t> chosen = chosen_tests(options);
  Pair kept;  // with --reuse, while it is healthy
  for (unsigned round = 0; round < options.repeat; ++round) {
    for (const std::size_t index : chosen) {
      const Test& test = registry()[index];
      Result result;
      result.name = test.name;
      result.items = test.items;
      result.seed = options.seed + round;
      if (test.options.slow && !options.slow) {
        result.outcome = Outcome::skipped;
        result.detail = "slow: run with --slow";
        if (!options.quiet) print(result);
        results.push_back(std::move(result));
        continue;
      }
      const auto begin = Clock::now();
      const int timeout_s = std::max(1, static_cast<int>(test.options.timeout_s * options.settings.timeout_scale));
      const auto end = begin + std::chrono::seconds(timeout_s);
      const bool keep = options.reuse && !test.options.solo;
      Pair pair = keep && !kept.roles.empty() ? std::move(kept) : start_pair(test.options.solo, options);
      kept.roles.clear();
      for (auto& role : pair.roles) role->order(static_cast<std::uint32_t>(index), result.seed);
      bool in_time = wait_for(pair, end, [](const Role& r) { return r.reported() || r.gone(); });
      const bool healthy = in_time && std::all_of(pair.roles.begin(), pair.roles.end(), [](const auto& r) {
                             return r->reported() && r->report().verdict == Verdict::passed && !r->gone();
                           });
      if (!(keep && healthy)) {
        for (auto& role : pair.roles) role->dismiss();
        // Leaving counts as part of the test: a library that hangs or crashes in its destructor has failed it.
        if (in_time) in_time = wait_for(pair, end, [](const Role& r) { return r.gone(); });
      }
      judge(pair, in_time, timeout_s, result);
      if (keep && healthy) kept = std::move(pair);
      result.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
      if (!options.quiet) print(result);
      const bool stop = options.fail_fast && result.outcome == Outcome::failed;
      results.push_back(std::move(result));
      if (stop) return results;
    }
  }
  return results;
}

std::string summary(const std::vector<Result>& results) {
  const auto count = [&](Outcome outcome) {
    return std::count_if(results.begin(), results.end(), [&](const Result& r) { return r.outcome == outcome; });
  };
  return text(count(Outcome::passed), " passed, ", count(Outcome::failed), " failed, ", count(Outcome::skipped), " skipped");
}

std::string to_json(const std::vector<Result>& results) {
  std::string out = "{\n  \"summary\": " + quoted(summary(results)) + ",\n  \"tests\": [";
  for (std::size_t i = 0; i < results.size(); ++i) {
    const Result& r = results[i];
    char seconds[32];
    std::snprintf(seconds, sizeof(seconds), "%.3f", r.seconds);
    out += text(i ? ",\n    " : "\n    ", "{\"name\": ", quoted(r.name), ", \"items\": ", quoted(r.items), ", \"outcome\": \"",
                r.outcome == Outcome::passed ? "passed" : r.outcome == Outcome::failed ? "failed" : "skipped",
                "\", \"seed\": ", r.seed, ", \"seconds\": ", std::string(seconds), ", \"detail\": ", quoted(r.detail), "}");
  }
  return out + "\n  ]\n}\n";
}

int child_from_arguments(int argc, char** argv) {
  if (argc < 8) return 2;
  ChildArguments arguments;
  arguments.is_a = std::string(argv[2]) == "a";
  if (std::sscanf(argv[3], "%d,%d,%d", &arguments.orders_fd, &arguments.peer_fd, &arguments.place_fd) != 3) return 2;
  arguments.settings.device = argv[4];
  arguments.settings.port = std::atoi(argv[5]);
  arguments.settings.gid_index = std::atoi(argv[6]);
  arguments.settings.timeout_scale = std::atof(argv[7]);
  return child_main(arguments);
}

}  // namespace vrdma::conformance
