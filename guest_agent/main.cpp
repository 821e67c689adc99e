// vrdma-guestd: serves RDMA verbs to the processes of a virtual machine. Reads flags, opens the device, runs the agent.
#include <getopt.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "guest_agent/agent.hpp"
#include "guest_agent/keeper.hpp"
#include "guest_agent/log.hpp"
#include "guest_agent/mapper.hpp"
#include "vmci_channel/journal.hpp"
#include "vmci_channel/standard_streams.hpp"
#include "vrdma/vm_device.hpp"
#include "vrdma/write_all.hpp"

namespace {

constexpr char usage[] =
    "vrdma-guestd serves RDMA verbs to the processes of a virtual machine whose host runs vrdmad.\n"
    "Usage: vrdma-guestd [OPTIONS]     (as root, inside the virtual machine)\n"
    "\n"
    "  --device DEVICE  the ivshmem device, as 0000:00:03.0, or User Mode Linux's /dev/mmapper; needed only where several are vrdma's\n"
    "  --socket PATH    where the processes attach (/run/vrdma/vrdmad.sock)\n"
    "  --ready-fd N     write a byte to this descriptor once processes can attach\n"
    "  --foreground     stay in the foreground (it always does; for scripts)\n"
    "  --version, --help\n";

int print(std::string_view text) {
  if (vrdma::write_all(STDOUT_FILENO, text)) return 0;
  std::fprintf(stderr, "vrdma-guestd: cannot write to standard output (%s): redirect it to where there is room\n", std::strerror(errno));
  return 1;
}

int mistake() {
  std::fputs("vrdma-guestd --help says what there is\n", stderr);
  return 2;
}

int fail(int code, const std::exception& error) {
  std::fprintf(stderr, "%svrdma-guestd: %s\n", vmci::journal_prefix(vmci::journal_error).c_str(), error.what());
  return code;
}

void serve(const vrdma::agent::Device& device, const vrdma::agent::Options& options, int stop) {
  const vrdma::agent::Keeper keeper(device);
  vrdma::agent::Agent(device, options).run(stop);
}

}  // namespace

int main(int argc, char** argv) {
  vmci::occupy_standard_streams();
  enum { device_flag = 1, socket_flag, ready_flag, foreground_flag, version_flag, help_flag };
  const option flags[] = {{"device", required_argument, nullptr, device_flag}, {"socket", required_argument, nullptr, socket_flag},
                          {"ready-fd", required_argument, nullptr, ready_flag}, {"foreground", no_argument, nullptr, foreground_flag},
                          {"version", no_argument, nullptr, version_flag},      {"help", no_argument, nullptr, help_flag},
                          {}};
  vrdma::agent::Options options;
  std::string device;
  for (int flag; (flag = ::getopt_long(argc, argv, "", flags, nullptr)) != -1;) {
    char* end = nullptr;
    switch (flag) {
      case device_flag:
        device = optarg;
        break;
      case socket_flag:
        options.socket = optarg;
        break;
      case ready_flag:
        options.ready_fd = static_cast<int>(std::strtol(optarg, &end, 10));
        if (*optarg == '\0' || *end != '\0' || options.ready_fd < 0) {
          std::fprintf(stderr, "vrdma-guestd: --ready-fd %s: give the number of a descriptor\n", optarg);
          return mistake();
        }
        break;
      case foreground_flag:
        break;
      case version_flag:
        return print("vrdma-guestd " VRDMA_VERSION "\n");
      case help_flag:
        return print(usage);
      default:
        return mistake();
    }
  }
  if (optind < argc) {
    std::fprintf(stderr, "vrdma-guestd: %s: there is nothing that it could be\n", argv[optind]);
    return mistake();
  }
  if (options.socket.empty()) {
    std::fputs("vrdma-guestd: --socket is empty: give the path of a socket\n", stderr);
    return mistake();
  }

  rlimit files{};
  if (::getrlimit(RLIMIT_NOFILE, &files) == 0) {
    files.rlim_cur = files.rlim_max;
    ::setrlimit(RLIMIT_NOFILE, &files);
  }
  sigset_t leaving;
  sigemptyset(&leaving);
  sigaddset(&leaving, SIGTERM);
  sigaddset(&leaving, SIGINT);
  struct sigaction hangup {};  // ignored under nohup
  if (::sigaction(SIGHUP, nullptr, &hangup) == 0 && hangup.sa_handler == SIG_DFL) sigaddset(&leaving, SIGHUP);
  ::sigprocmask(SIG_BLOCK, &leaving, nullptr);
  const vmci::UniqueFd signals(::signalfd(-1, &leaving, SFD_CLOEXEC));
  try {
    if (!signals) throw std::runtime_error("cannot make a descriptor for signals: raise the limit of open files");
    if (device.empty() && vrdma::vm::device_seen() == vrdma::vm::mapper_path)
      device = vrdma::vm::mapper_path;
    if (device.starts_with('/')) {
      const vrdma::agent::MapperDevice mapper(device);
      vrdma::agent::say("%s uses %s, by polling", VRDMA_VERSION, device.c_str());
      serve(mapper.device(), options, signals.get());
    } else {
      const vrdma::agent::IvshmemDevice ivshmem(device);
      vrdma::agent::say("%s uses PCI device %s, %s", VRDMA_VERSION, ivshmem.bdf().c_str(),
                        ivshmem.device().interrupt >= 0 ? "by interrupts" : "by polling");
      serve(ivshmem.device(), options, signals.get());
    }
  } catch (const vrdma::agent::NoDevice& error) {
    return fail(2, error);  // the unit does not try again
  } catch (const std::exception& error) {
    return fail(1, error);
  }
  return 0;
}
