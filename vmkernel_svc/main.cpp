// vrdmad: the host service. Reads flags and configuration, sets up the log, runs the server.
#include <fcntl.h>
#include <fmt/format.h>
#include <linux/magic.h>
#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/basic_file_sink.h>
#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <limits>
#include <memory>
#include <new>
#include <sstream>
#include <system_error>

#include "vmci_channel/journal.hpp"
#include "vmci_channel/standard_streams.hpp"
#include "vmkernel_svc/config.hpp"
#include "vmkernel_svc/machines/keeper.hpp"
#include "vmkernel_svc/serve.hpp"
#include "vrdma/write_all.hpp"

namespace {

// The journal has times and names of its own; of a line's level it learns by the number in front.
class JournalPriority : public spdlog::custom_flag_formatter {
 public:
  void format(const spdlog::details::log_msg& message, const std::tm&, spdlog::memory_buf_t& line) override {
    constexpr char of_level[] = {vmci::journal_debug, vmci::journal_debug, vmci::journal_info, vmci::journal_warning, vmci::journal_error, vmci::journal_error};
    const char priority[] = {'<', of_level[std::min<std::size_t>(message.level, std::size(of_level) - 1)], '>'};
    line.append(priority, priority + sizeof(priority));
  }
  std::unique_ptr<custom_flag_formatter> clone() const override { return std::make_unique<JournalPriority>(); }
};

void open_log(const std::string& file) try {
  if (!file.empty()) return spdlog::set_default_logger(spdlog::basic_logger_mt("vrdmad", file));
  spdlog::set_default_logger(spdlog::stderr_color_mt("vrdmad"));
  if (!vmci::journal_reads_stderr()) return;
  auto formatter = std::make_unique<spdlog::pattern_formatter>();
  formatter->add_flag<JournalPriority>('*').set_pattern("%*%v");
  spdlog::set_formatter(std::move(formatter));
} catch (const spdlog::spdlog_ex& error) {
  throw std::runtime_error(fmt::format("cannot open the log: {}: give another --log-file", error.what()));
}

bool can_be_written(int descriptor) {
  const int flags = ::fcntl(descriptor, F_GETFL);
  return flags >= 0 && (flags & O_PATH) == 0 && (flags & O_ACCMODE) != O_RDONLY;
}

// What keeps a file, and the folders that are missing above it, from being made: an errno; 0: nothing is known.
int why_not_made(const std::string& file) {
  std::filesystem::path folder = std::filesystem::absolute(file).parent_path();
  struct stat status;
  while (::stat(folder.c_str(), &status) != 0) {
    if (errno != ENOENT || !folder.has_relative_path()) return errno;
    folder = folder.parent_path();
  }
  if (!S_ISDIR(status.st_mode)) return ENOTDIR;
  struct statfs system;
  if (::statfs(folder.c_str(), &system) == 0 && (system.f_type == PROC_SUPER_MAGIC || system.f_type == SYSFS_MAGIC)) return EROFS;
  return ::faccessat(AT_FDCWD, folder.c_str(), W_OK | X_OK, AT_EACCESS) == 0 ? 0 : errno;
}

// The same, where it is nothing that another user, or the unit, does not meet.
int why_never_made(const std::string& file) {
  const int error = why_not_made(file);
  return error == ENOTDIR || error == EROFS ? error : 0;
}

// Whether open_log() would, without making anything. Of one that is not there, what keeps anybody from it: see check_socket().
void check_log(const std::string& file) {
  struct stat status;
  const int error = file.empty()                                                    ? 0
                    : ::stat(file.c_str(), &status) != 0                            ? errno == ENOENT ? why_never_made(file) : errno
                    : S_ISDIR(status.st_mode)                                       ? EISDIR
                    : ::faccessat(AT_FDCWD, file.c_str(), W_OK, AT_EACCESS) != 0    ? errno
                                                                                    : 0;
  if (error != 0) throw std::runtime_error(fmt::format("cannot open the log {} ({}): give another --log-file", file, std::strerror(error)));
}

// Whoever checks a configuration need not be the user who will serve it, or its unit, that makes folders first.
void check_socket(const std::string& socket) {
  struct stat status;
  if (::lstat(socket.c_str(), &status) == 0) return;  // check_files() looks at what it is
  if (const int error = why_never_made(socket); error != 0)
    throw std::runtime_error(fmt::format("cannot listen at {} ({}): give another --socket", socket, std::strerror(error)));
}

// The exit code.
int print(const std::string& text) {
  if (vrdma::write_all(STDOUT_FILENO, text)) return 0;
  std::fprintf(stderr, "vrdmad: cannot write to standard output (%s): redirect it to where there is room\n", std::strerror(errno));
  return 1;
}

// CLI11 says of a word that is no number that it could not convert it.
template <class Number>
CLI::Option* takes_whole(CLI::Option* option, Number least, Number most) {
  return option->check([least, most](const std::string& text) {
    Number value{};
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    return error == std::errc() && end == text.data() + text.size() && value >= least && value <= most
               ? std::string()
               : fmt::format("\"{}\" is no whole number from {} to {}", text, least, most);
  });
}

// The exit code.
int fail(int code, const std::exception& error) {
  const auto* const system = dynamic_cast<const std::system_error*>(&error);
  const bool is_limit = dynamic_cast<const std::bad_alloc*>(&error) != nullptr ||
                        (system != nullptr && system->code() == std::errc::resource_unavailable_try_again);  // of a thread
  std::fprintf(stderr, "%svrdmad: %s%s\n", vmci::journal_prefix(vmci::journal_error).c_str(), error.what(),
               is_limit ? ": too little memory or too few threads are allowed; raise the limits (ulimit -v, -d, -u)" : "");
  return code;
}

}  // namespace

int main(int argc, char** argv) {
  using vrdma::svc::Config;
  vmci::occupy_standard_streams();
  CLI::App app{"vrdmad serves RDMA verbs to the processes, containers and VMs of this host that load libvrdma.\n"
               "It needs no HCA, no kernel module and no root."};
  app.set_version_flag("--version", "vrdmad " VRDMA_VERSION);
  std::string file, socket, vm_folder, link_layer, direct, log_file, log_level;
  std::uint32_t idle_exit_s = 0, shards = 0;
  int ready_fd = -1;
  bool check_only = false;
  auto* const from_file = app.add_option("-c,--config", file, "JSON configuration file; flags override it");
  auto* const at_socket = app.add_option("-s,--socket", socket, "path of the socket that guests attach to");
  auto* const machines = app.add_option("--vm-folder", vm_folder, "folder of the virtual machines; default: vm beside the socket");
  auto* const layer = app.add_option("--link-layer", link_layer, "infiniband (or ib; default) or ethernet, for guests that do not ask");
  auto* const who_moves = app.add_option("--direct", direct, "auto: programs that may reach each other's memory move the data themselves; mediated (default): never");
  auto* const threads = takes_whole(app.add_option("--shards", shards, "threads that move data; default: one for every four processors"), 1u, vrdma::svc::shards_max);
  app.add_option("--log-file", log_file, "log there instead of standard error");
  auto* const level = app.add_option("--log-level", log_level, "trace, debug, info, warn, error or off");
  auto* const idle = takes_whole(app.add_option("--idle-exit", idle_exit_s, "leave after so many seconds without a guest; 0: never"), 0u, std::numeric_limits<std::uint32_t>::max());
  auto* const ready = takes_whole(app.add_option("--ready-fd", ready_fd, "write a byte to this descriptor once guests can attach"), 0, std::numeric_limits<int>::max());
  std::string keeper;
  app.add_option("--keeper", keeper, "")->group("");  // vrdmad's own use, machines/keeper.hpp
  bool one_user = false;
  app.add_flag("--one-user", one_user, "only this user comes, who may have most of its descriptors (vrdma run)");
  bool foreground = false;
  app.add_flag("--foreground", foreground, "stay in the foreground (it always does; for scripts)");
  app.add_flag("--check", check_only, "check the configuration and leave");
  app.failure_message([](const CLI::App*, const CLI::Error& error) {
    return std::string("vrdmad: ") + error.what() + "\nvrdmad --help says what there is\n";
  });
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::ostringstream text;
    if (app.exit(error, text) != 0) return 2;
    return print(text.str());  // --help, --version
  }

  std::signal(SIGPIPE, SIG_IGN);  // who reads its log may leave before it: a terminal, `| tee`
  std::signal(SIGXFSZ, SIG_IGN);  // what a limit of file sizes forbids, shared memory, too, fails by itself and is told

  if (!keeper.empty()) return vrdma::svc::Keeper::serve(keeper);
  Config config;
  try {
    // What is given and empty (an unset variable of a script) is refused like any other wrong value.
    if (from_file->count() != 0) config.read_file(file);
    if (at_socket->count() != 0) config.socket = socket;
    if (machines->count() != 0) config.vm_folder = vm_folder;
    if (layer->count() != 0) config.link_layer = link_layer == "ib" ? "infiniband" : link_layer;
    if (who_moves->count() != 0) config.direct = direct;
    if (threads->count() != 0) config.shards = shards;
    if (!log_file.empty()) config.log_file = log_file;
    if (level->count() != 0) config.log_level = log_level;
    if (idle->count() != 0) config.idle_exit_s = idle_exit_s;
    if (ready->count() != 0 && !can_be_written(ready_fd)) throw std::runtime_error(fmt::format("--ready-fd is {}, which is no descriptor that is open for writing", ready_fd));
    config.ready_fd = ready_fd;
    config.one_user = one_user;
    try {
      config.check();
    } catch (const std::runtime_error& error) {
      throw from_file->count() == 0 ? error : std::runtime_error(file + ": " + error.what());
    }
    if (check_only) {
      vrdma::svc::check_files(config);
      check_log(config.log_file);
      check_socket(config.socket);
      return print("the configuration is good\n");
    }
    open_log(config.log_file);
  } catch (const std::exception& error) {
    return fail(2, error);  // which time does not heal: the unit does not try again
  }
  try {
    spdlog::set_error_handler([](const std::string& message) {  // a full disk must not stop the service
      static bool said = false;
      if (!said) std::fprintf(stderr, "vrdmad: cannot write the log: %s\n", message.c_str());
      said = true;
    });
    spdlog::set_level(spdlog::level::from_str(config.log_level));
    spdlog::flush_on(spdlog::level::info);
    vrdma::svc::check_files(config);
    vrdma::svc::serve(config);
  } catch (const vrdma::svc::WrongConfiguration& error) {
    return fail(2, error);
  } catch (const std::exception& error) {
    return fail(1, error);
  }
  return 0;
}
