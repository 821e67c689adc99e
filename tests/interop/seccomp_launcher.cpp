// Runs a program under a system call filter like that of a container's default profile; stricter in ptrace and
// process_vm_*, which today's profiles allow on newer kernels but many sites still refuse.
//
//   seccomp_launcher PROGRAM ARGUMENT...   refuses the calls below with EPERM and runs the program
//   seccomp_launcher --unit PROGRAM ARGUMENT...   kills it at any call outside of systemd's @system-service, as units with
//                                          SystemCallFilter=@system-service do
//   seccomp_launcher --probe               prints one line for each: its name and the errno it answers with
//
// As a container engine does, it leaves out what the holder of CAP_SYS_PTRACE or CAP_SYS_ADMIN may do. One thread, no
// allocation after the filter stands; it never changes anything but itself.
#include <errno.h>
#include <linux/audit.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

namespace {

#if defined(__x86_64__)
constexpr std::uint32_t native_arch = AUDIT_ARCH_X86_64;
constexpr std::uint32_t foreign_numbers_from = 0x40000000;  // x32's system calls
#elif defined(__aarch64__)
constexpr std::uint32_t native_arch = AUDIT_ARCH_AARCH64;
constexpr std::uint32_t foreign_numbers_from = 0x80000000;
#else
#error "give the audit architecture of this machine"
#endif

enum class Unless : std::uint8_t { never, ptrace, admin };  // the capability that lifts the refusal

struct Refused {
  const char* name;
  long number;
  Unless unless;
};

constexpr Refused refused[] = {
    {"userfaultfd", SYS_userfaultfd, Unless::ptrace},
    {"ptrace", SYS_ptrace, Unless::ptrace},
    {"process_vm_readv", SYS_process_vm_readv, Unless::ptrace},
    {"process_vm_writev", SYS_process_vm_writev, Unless::ptrace},
    {"kcmp", SYS_kcmp, Unless::ptrace},
    {"process_madvise", SYS_process_madvise, Unless::ptrace},
    {"pidfd_getfd", SYS_pidfd_getfd, Unless::ptrace},
    {"perf_event_open", SYS_perf_event_open, Unless::admin},
    {"bpf", SYS_bpf, Unless::admin},
    {"mount", SYS_mount, Unless::admin},
    {"umount2", SYS_umount2, Unless::admin},
    {"pivot_root", SYS_pivot_root, Unless::admin},
    {"setns", SYS_setns, Unless::admin},
    {"unshare", SYS_unshare, Unless::admin},
    {"open_by_handle_at", SYS_open_by_handle_at, Unless::admin},
    {"fanotify_init", SYS_fanotify_init, Unless::admin},
    {"keyctl", SYS_keyctl, Unless::never},
    {"add_key", SYS_add_key, Unless::never},
    {"request_key", SYS_request_key, Unless::never},
    {"move_pages", SYS_move_pages, Unless::never},
    {"io_uring_setup", SYS_io_uring_setup, Unless::never},
    {"io_uring_enter", SYS_io_uring_enter, Unless::never},
    {"io_uring_register", SYS_io_uring_register, Unless::never},
    {"kexec_load", SYS_kexec_load, Unless::never},
    {"init_module", SYS_init_module, Unless::never},
    {"finit_module", SYS_finit_module, Unless::never},
    {"delete_module", SYS_delete_module, Unless::never},
};

// What `systemd-analyze syscall-filter` (252) has in no part of @system-service; of what every architecture has.
constexpr long not_for_units[] = {
    SYS_acct, SYS_adjtimex, SYS_bpf, SYS_chroot, SYS_clock_adjtime, SYS_clock_settime, SYS_delete_module, SYS_fanotify_init, SYS_fanotify_mark,
    SYS_finit_module, SYS_init_module, SYS_kexec_load, SYS_mincore, SYS_mount, SYS_open_by_handle_at, SYS_perf_event_open, SYS_pidfd_getfd,
    SYS_pivot_root, SYS_pkey_alloc, SYS_pkey_free, SYS_pkey_mprotect, SYS_ptrace, SYS_quotactl, SYS_reboot, SYS_seccomp, SYS_setdomainname,
    SYS_sethostname, SYS_settimeofday, SYS_swapoff, SYS_swapon, SYS_syslog, SYS_umount2, SYS_vhangup};

bool holds(unsigned capability) {
  __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct data[2] = {};
  if (::syscall(SYS_capget, &header, data) != 0) return false;
  return (data[capability / 32].effective & (1u << (capability % 32))) != 0;
}

sock_filter statement(std::uint16_t code, std::uint32_t value) { return {code, 0, 0, value}; }
sock_filter jump(std::uint16_t code, std::uint32_t value, std::uint8_t if_true, std::uint8_t if_false) {
  return {code, if_true, if_false, value};
}

std::vector<sock_filter> make_filter(bool may_ptrace, bool is_admin) {
  constexpr std::uint16_t load = BPF_LD | BPF_W | BPF_ABS, equal = BPF_JMP | BPF_JEQ | BPF_K, answer = BPF_RET | BPF_K;
  constexpr std::uint32_t refuse = SECCOMP_RET_ERRNO | EPERM;
  std::vector<sock_filter> filter{
      statement(load, offsetof(seccomp_data, arch)),
      jump(equal, native_arch, 1, 0),
      statement(answer, SECCOMP_RET_KILL_PROCESS),
      statement(load, offsetof(seccomp_data, nr)),
      jump(BPF_JMP | BPF_JGE | BPF_K, foreign_numbers_from, 0, 1),
      statement(answer, SECCOMP_RET_ERRNO | ENOSYS),
  };
  for (const auto& call : refused) {
    if ((call.unless == Unless::ptrace && may_ptrace) || (call.unless == Unless::admin && is_admin)) continue;
    filter.push_back(jump(equal, static_cast<std::uint32_t>(call.number), 0, 1));
    filter.push_back(statement(answer, refuse));
  }
  if (!is_admin) {
    // clone3 hides its flags behind a pointer: ENOSYS sends libc to clone, whose flags can be read here.
    filter.push_back(jump(equal, SYS_clone3, 0, 1));
    filter.push_back(statement(answer, SECCOMP_RET_ERRNO | ENOSYS));
    filter.push_back(jump(equal, SYS_clone, 0, 3));
    filter.push_back(statement(load, offsetof(seccomp_data, args[0])));
    filter.push_back(jump(BPF_JMP | BPF_JSET | BPF_K, CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC, 0, 1));
    filter.push_back(statement(answer, refuse));
  }
  filter.push_back(statement(answer, SECCOMP_RET_ALLOW));
  return filter;
}

std::vector<sock_filter> make_unit_filter() {
  std::vector<sock_filter> filter{{BPF_LD | BPF_W | BPF_ABS, 0, 0, offsetof(seccomp_data, nr)}};
  for (const long call : not_for_units) {
    filter.push_back(jump(BPF_JMP | BPF_JEQ | BPF_K, static_cast<std::uint32_t>(call), 0, 1));
    filter.push_back(statement(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS));
  }
  filter.push_back(statement(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  return filter;
}

bool install(std::vector<sock_filter> filter) {
  const sock_fprog program{static_cast<unsigned short>(filter.size()), filter.data()};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && ::syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program) == 0;
}

// Arguments that no kernel accepts: a call that is let through changes nothing and answers with another errno.
int probe() {
  for (const auto& call : refused) {
    errno = 0;
    const long result = ::syscall(call.number, -1L, -1L, -1L, -1L, -1L, -1L);
    std::printf("%s %s\n", call.name, result >= 0 ? "allowed" : errno == EPERM ? "EPERM" : "other");
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const bool is_unit = argc > 1 && std::strcmp(argv[1], "--unit") == 0;
  if (is_unit) --argc, ++argv;
  if (argc < 2) {
    std::fprintf(stderr, "usage: seccomp_launcher (--probe | [--unit] PROGRAM [ARGUMENT...])\n");
    return 2;
  }
  if (!install(is_unit ? make_unit_filter() : make_filter(holds(CAP_SYS_PTRACE), holds(CAP_SYS_ADMIN)))) {
    std::fprintf(stderr, "seccomp_launcher: cannot install the filter (%s)\n", std::strerror(errno));
    return 125;
  }
  if (std::strcmp(argv[1], "--probe") == 0) return probe();
  ::execvp(argv[1], argv + 1);
  std::fprintf(stderr, "seccomp_launcher: cannot run %s (%s)\n", argv[1], std::strerror(errno));
  return 127;
}
