// A guest that means harm: attaches by raw packets, makes real objects, then writes and passes garbage, random and targeted, by
// a seed, until its time is over. One target a process:
//
//   hostile_guest SOCKET TARGET SEED SECONDS [UID]      target machine_…: one of three beside the socket, by the seed; no UID
//
// It never judges the service: hostile_test does, from outside. Exit code 0 unless it could not attach even once.
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <utility>

#include "tests/hostile/raid.hpp"

int main(int argc, char** argv) {
  using namespace vrdma::hostile;
  if (argc < 5) {
    std::fprintf(stderr, "usage: hostile_guest SOCKET TARGET SEED SECONDS [UID]\n");
    return 2;
  }
  const std::string_view target = argv[2];
  const std::uint64_t seed = std::strtoull(argv[3], nullptr, 0);
  rlimit files{};
  ::getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &files);
  faults = open_userfaultfd();
  if (argc > 5) {
    const auto uid = static_cast<uid_t>(std::strtoul(argv[5], nullptr, 0));
    if (::setgid(uid) != 0 || ::setuid(uid) != 0) return 2;
    ::prctl(PR_SET_DUMPABLE, 1);
  }
  ::signal(SIGPIPE, SIG_IGN);
  constexpr std::pair<std::string_view, void (*)(Raid&)> raids[] = {
      {"rings", raid_rings},   {"control", raid_control}, {"socket", raid_socket}, {"descriptors", raid_descriptors},
      {"memory", raid_memory}, {"copies", raid_copies}, {"events", raid_events},   {"flood", raid_flood},
      {"machine_bar", raid_machine_bar},     {"machine_frames", raid_machine_frames},
      {"machine_bells", raid_machine_bells}, {"machine_rings", raid_machine_rings}};
  for (const auto& [name, run] : raids) {
    if (name != target) continue;
    Raid raid{argv[1], Dice(seed), now_ms() + std::strtoull(argv[4], nullptr, 0) * 1000, seed};
    std::uint64_t lives = 0;
    for (; !raid.over(); ++lives) run(raid);
    std::printf("%s seed %llu: %llu lives, %llu attached, %llu blows\n", argv[2], static_cast<unsigned long long>(seed),
                static_cast<unsigned long long>(lives), static_cast<unsigned long long>(raid.attached),
                static_cast<unsigned long long>(raid.blows));
    return raid.attached != 0 ? 0 : 1;
  }
  std::fprintf(stderr, "hostile_guest: no target \"%s\"\n", argv[2]);
  return 2;
}
