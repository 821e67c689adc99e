// What a process has mapped, as it is read by either method, also where nothing can be opened or the first thread has ended.
#include "guest_lib/memory/vma.hpp"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>

#include "guest_lib/memory/test_support.hpp"
#include "guest_lib/memory/vma_budget.hpp"

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

// A newline of a path is written as four characters, so that one which open(2) takes may fill more than any buffer.
TEST_CASE("A mapping of a file with a path longer than what is read at once is told of as any other, and so are those behind it") {
  CHECK(in_child([] {
          constexpr int depth = 10;
          const std::string name(255, '\n');
          char top[] = "/tmp/vrdma-long-path-XXXXXX";
          if (::mkdtemp(top) == nullptr || ::chdir(top) != 0) return 1;
          int entered = 0;
          while (entered < depth && ::mkdir(name.c_str(), 0700) == 0 && ::chdir(name.c_str()) == 0) ++entered;
          int result = entered == depth ? 0 : 2;
          unsigned char* const p = map_anonymous(3 * page);
          struct stat status{};
          {
            const vmci::UniqueFd file(::open("file", O_RDWR | O_CREAT | O_CLOEXEC, 0600));
            if (!file || ::ftruncate(file.get(), page) != 0 || ::fstat(file.get(), &status) != 0 ||
                ::mmap(p + page, page, PROT_READ, MAP_SHARED | MAP_FIXED, file.get(), 0) != p + page)
              result = 3;
          }
          ::unlink("file");
          for (int i = 0; i < entered; ++i)
            if (::chdir("..") != 0 || ::rmdir(name.c_str()) != 0) result = 4;
          if (::rmdir(top) != 0 || result != 0) return result != 0 ? result : 5;
          for (const auto method : {VmaReader::Method::best, VmaReader::Method::text}) {
            auto reader = VmaReader::open(method), behind = VmaReader::open(method);
            if (!reader || !behind) return 6;
            for (int round = 0; round < 2; ++round) {  // the second begins anew
              const auto before = reader->at_or_after(at(p)), long_one = reader->at_or_after(at(p) + page), after = reader->at_or_after(at(p) + 2 * page);
              if (!before || !long_one || !after) return 7;
              if (before->range.end != at(p) + page || !before->private_anonymous()) return 8;
              if (long_one->range != Range{at(p) + page, at(p) + 2 * page} || !long_one->shared || long_one->writable || long_one->file.inode != status.st_ino) return 9;
              if (after->range.begin != at(p) + 2 * page || !after->private_anonymous()) return 10;
            }
            const auto alone = behind->at_or_after(at(p) + 2 * page);
            if (!alone || alone->range.begin != at(p) + 2 * page) return 11;
          }
          return 0;
        }) == 0);
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

namespace {
std::uint64_t mappings, counted;  // of a process that is made up
Result<std::uint64_t> count_made_up() {
  ++counted;
  return mappings;
}
}  // namespace

TEST_CASE("Mappings are counted seldom, however many runs move or stay, and half of what the kernel allows is left") {
  std::uint64_t most = 0;
  std::ifstream("/proc/sys/vm/max_map_count") >> most;
  REQUIRE(most > 4096);
  constexpr std::uint64_t large = 1 << 20, others = 1000;
  mappings = others, counted = 0;
  VmaBudget budget(count_made_up);
  for (std::uint64_t i = 0; i < most; ++i)
    if (budget.take(large)) mappings += 2;
  CHECK(mappings <= most / 2);
  CHECK(mappings + 1000 > most / 2);
  CHECK(counted < 64);  // not once in 128 times

  // Where there is room again runs move again, not much later than they stayed.
  mappings = others;
  std::uint64_t refused = 0;
  while (refused < most && !budget.take(large)) ++refused;
  CHECK(refused <= most / 16);

  // The program's own mappings are seen before it has none left.
  mappings = others, counted = 0;
  VmaBudget beside(count_made_up);
  bool told = false;
  for (std::uint64_t i = 0; i < most && mappings < most && !told; ++i) {
    mappings += 1;
    if (beside.take(large)) mappings += 2;
    else told = true;
  }
  CHECK(told);
  CHECK(mappings < most * 3 / 4);
}
