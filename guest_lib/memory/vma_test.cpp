// What a process has mapped, as it is read by either method, also where nothing can be opened or the first thread has ended.
#include "guest_lib/memory/vma.hpp"

#include <doctest/doctest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>

#include "guest_lib/memory/test_support.hpp"

using namespace vrdma;
using namespace vrdma::memory;
using namespace vrdma::memory::test;

TEST_CASE("Mappings are found also when the first thread has ended") {
  static const char page[1] = {};
  const pid_t child = ::fork();
  if (child == 0) {
    std::thread([] {
      const auto zombie = [] {
        std::ifstream status("/proc/self/stat");
        const std::string text(std::istreambuf_iterator<char>(status), {});
        const auto behind = text.rfind(')');
        return behind != std::string::npos && text.substr(behind + 2, 1) == "Z";
      };
      for (int i = 0; i < 10'000 && !zombie(); ++i) ::usleep(1000);
      auto reader = VmaReader::open();
      const auto vma = reader ? reader->at_or_after(reinterpret_cast<std::uint64_t>(page)) : Result<Vma>(reader.error());
      const bool found = vma && vma->range.begin <= reinterpret_cast<std::uint64_t>(page) && *count_mappings() > 0;
      ::_exit(!zombie() ? 2 : found ? 0 : 1);
    }).detach();
    ::syscall(SYS_exit, 0);
  }
  int status = -1;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
}

TEST_CASE("The ioctl and the text of /proc/self/maps describe the same mappings") {
  auto query = VmaReader::open();
  auto text = VmaReader::open(VmaReader::Method::text);
  REQUIRE(query.has_value());
  REQUIRE(text.has_value());
  int seen = 0;
  for (std::uint64_t address = 0;; ++seen) {
    const auto a = query->at_or_after(address), b = text->at_or_after(address);
    REQUIRE(static_cast<bool>(a) == static_cast<bool>(b));
    // vsyscall is in the text only.
    if (!a) break;
    CHECK(a->range == b->range);
    CHECK(a->file == b->file);
    CHECK(a->file_offset == b->file_offset);
    CHECK(a->protection() == b->protection());
    CHECK(a->shared == b->shared);
    address = a->range.end;
    const auto next = text->at_or_after(address);
    if (next && next->range.begin >= (std::uint64_t{1} << 63)) break;
  }
  CHECK(seen > 5);
}

TEST_CASE("Where no file can be opened the mappings are read from one that was kept, by any number of readers, and not from a parent's") {
  CHECK(in_child([] {
          keep_maps();
          constexpr std::uint64_t pages = 400;  // more lines than are read at once
          unsigned char* const p = map_anonymous(pages * page);
          for (std::uint64_t i = 0; i < pages; i += 2) ::mprotect(p + i * page, page, PROT_READ);
          std::atomic<int> wrong{0}, started{0};
          std::atomic<bool> limited{false};
          const auto walk = [&](VmaReader::Method method) {
            ++started;
            while (!limited) std::this_thread::yield();
            for (int round = 0; round < 20; ++round) {
              auto reader = VmaReader::open(method);
              auto other = VmaReader::open(method);  // at once
              for (std::uint64_t i = 0; i < pages; ++i) {
                const auto vma = reader ? reader->at_or_after(at(p) + i * page) : Result<Vma>(reader.error());
                const Range wanted{at(p) + i * page, at(p) + (i + 1) * page};
                if (!vma || vma->range.begin > wanted.begin || vma->range.end < wanted.end || vma->writable != (i % 2 == 1)) ++wrong;
                if (i % 50 == 0 && (!other || !other->at_or_after(at(p)))) ++wrong;
              }
            }
          };
          const struct rlimit none { 0, 0 };
          int refused;
          {
            const std::jthread text(walk, VmaReader::Method::text), more(walk, VmaReader::Method::text), best(walk, VmaReader::Method::best);
            while (started != 3) std::this_thread::yield();  // UndefinedBehaviorSanitizer looks at a new thread's objects through a pipe
            refused = ::setrlimit(RLIMIT_NOFILE, &none);
            limited = true;
          }
          if (refused != 0) return 1;
          if (wrong != 0) return 2;
          // What lies below becomes fewer lines while one has read half of it and another something else.
          auto reader = VmaReader::open(VmaReader::Method::text), other = VmaReader::open(VmaReader::Method::text);
          for (std::uint64_t i = 0; i < pages; ++i) {
            if (i == pages / 2) {
              if (!other->at_or_after(0)) return 4;
              ::mprotect(p, pages / 4 * page, PROT_READ | PROT_WRITE);
            }
            const auto vma = reader->at_or_after(at(p) + i * page);
            if (!vma || vma->range.end != at(p) + (i + 1) * page) return 5;
          }
          const int child = in_child([] {
            const bool of_parent = VmaReader::open().has_value();
            forget_maps();
            return of_parent ? 1 : 0;
          });
          return child == 0 ? 0 : 3;
        }) == 0);
}
