#include "cli/self_test.hpp"

#include <dlfcn.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <infiniband/verbs.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "cli/query.hpp"
#include "cli/service.hpp"
#include "vmci_channel/unique_fd.hpp"

// verbs.h wraps these in macros; the functions themselves are meant here.
#undef ibv_reg_mr
#undef ibv_query_port

namespace vrdma::cli {

namespace {

constexpr unsigned watchdog_s = 10;
constexpr int completion_wait_s = 5;
constexpr std::size_t pages_bytes = 64 * 1024;

struct Report {  // from the child, written whole
  char failed_at[96];
  char error[160];
};

struct Failure {
  std::string at, error;
};

class Verbs {
 public:
  explicit Verbs(const std::string& library) : handle_(::dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    if (handle_ == nullptr) throw Failure{"loading " + library, ::dlerror()};
  }
  template <class Function>
  Function* get(const char* name) const {
    void* const symbol = ::dlsym(handle_, name);
    if (symbol == nullptr) throw Failure{std::string("finding ") + name + " in the library", ::dlerror()};
    return reinterpret_cast<Function*>(symbol);
  }

 private:
  void* handle_;
};

[[noreturn]] void fail_call(const std::string& at, int error) { throw Failure{at, std::strerror(error)}; }
template <class T>
T* need(T* pointer, const char* at) {
  if (pointer == nullptr) fail_call(at, errno);
  return pointer;
}
void need_zero(int error, const char* at) {
  if (error != 0) fail_call(at, error);
}

void connect_to_itself(const Verbs& verbs, ibv_context* context, ibv_qp* qp) {
  ibv_port_attr port{};
  need_zero(verbs.get<int(ibv_context*, std::uint8_t, ibv_port_attr*)>("ibv_query_port")(context, 1, &port), "ibv_query_port");
  auto* const modify = verbs.get<int(ibv_qp*, ibv_qp_attr*, int)>("ibv_modify_qp");
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_INIT;
  attributes.port_num = 1;
  attributes.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
  need_zero(modify(qp, &attributes, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS), "ibv_modify_qp to INIT");
  attributes.qp_state = IBV_QPS_RTR;
  attributes.path_mtu = port.active_mtu;
  attributes.dest_qp_num = qp->qp_num;
  attributes.ah_attr.port_num = 1;
  attributes.ah_attr.dlid = port.lid;
  if (port.link_layer == IBV_LINK_LAYER_ETHERNET) {
    attributes.ah_attr.is_global = 1;
    attributes.ah_attr.grh.hop_limit = 1;
    need_zero(verbs.get<int(ibv_context*, std::uint8_t, int, ibv_gid*)>("ibv_query_gid")(context, 1, 0, &attributes.ah_attr.grh.dgid),
              "ibv_query_gid");
  }
  need_zero(modify(qp, &attributes,
                   IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
                       IBV_QP_MIN_RNR_TIMER),
            "ibv_modify_qp to RTR");
  attributes.qp_state = IBV_QPS_RTS;
  attributes.timeout = 14;
  attributes.retry_cnt = 3;
  need_zero(modify(qp, &attributes,
                   IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC),
            "ibv_modify_qp to RTS");
}

void write_and_check(const char* what, ibv_qp* qp, ibv_cq* cq, const ibv_mr* mr, unsigned char* from, unsigned char* to, std::uint32_t bytes) {
  for (std::uint32_t i = 0; i < bytes; ++i) from[i] = static_cast<unsigned char>(i * 7 + 1);
  ibv_sge piece{reinterpret_cast<std::uintptr_t>(from), bytes, mr->lkey};
  ibv_send_wr request{}, *bad = nullptr;
  request.sg_list = &piece;
  request.num_sge = 1;
  request.opcode = IBV_WR_RDMA_WRITE;
  request.send_flags = IBV_SEND_SIGNALED;
  request.wr.rdma.remote_addr = reinterpret_cast<std::uintptr_t>(to);
  request.wr.rdma.rkey = mr->rkey;
  need_zero(ibv_post_send(qp, &request, &bad), "ibv_post_send");
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(completion_wait_s);
  ibv_wc completion{};
  int polled = 0;
  while ((polled = ibv_poll_cq(cq, 1, &completion)) == 0)
    if (std::chrono::steady_clock::now() > until) throw Failure{what, "no completion came"};
  if (polled < 0) throw Failure{what, "ibv_poll_cq failed"};
  if (completion.status != IBV_WC_SUCCESS) throw Failure{what, fmt::format("completion status {}", static_cast<int>(completion.status))};
  if (std::memcmp(from, to, bytes) != 0) throw Failure{what, "the bytes that arrived are not those that were sent"};
}

// Leaves everything open: the caller looks at it through the service before the child ends.
void exercise(const std::string& library) {
  const Verbs verbs(library);
  int count = 0;
  ibv_device** const devices = need(verbs.get<ibv_device**(int*)>("ibv_get_device_list")(&count), "ibv_get_device_list");
  if (count == 0) throw Failure{"ibv_get_device_list", "it lists no device"};
  ibv_context* const context = need(verbs.get<ibv_context*(ibv_device*)>("ibv_open_device")(devices[0]), "ibv_open_device");
  ibv_pd* const pd = need(verbs.get<ibv_pd*(ibv_context*)>("ibv_alloc_pd")(context), "ibv_alloc_pd");
  ibv_cq* const cq = need(verbs.get<ibv_cq*(ibv_context*, int, void*, ibv_comp_channel*, int)>("ibv_create_cq")(context, 16, nullptr, nullptr, 0),
                          "ibv_create_cq");
  ibv_qp_init_attr wanted{};
  wanted.send_cq = wanted.recv_cq = cq;
  wanted.qp_type = IBV_QPT_RC;
  wanted.cap.max_send_wr = wanted.cap.max_recv_wr = wanted.cap.max_send_sge = wanted.cap.max_recv_sge = 1;
  ibv_qp* const qp = need(verbs.get<ibv_qp*(ibv_pd*, ibv_qp_init_attr*)>("ibv_create_qp")(pd, &wanted), "ibv_create_qp");
  connect_to_itself(verbs, context, qp);

  auto* const reg = verbs.get<ibv_mr*(ibv_pd*, void*, std::size_t, int)>("ibv_reg_mr");
  constexpr int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
  // Too small to be mapped, and outside malloc: it stays where it is until the process ends.
  static unsigned char small[16];
  const ibv_mr* const small_mr = need(reg(pd, small, sizeof(small), access), "ibv_reg_mr of 16 bytes");
  write_and_check("an RDMA WRITE of 8 bytes", qp, cq, small_mr, small, small + 8, 8);
  void* const pages = ::mmap(nullptr, pages_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) fail_call("mmap", errno);
  auto* const bytes = static_cast<unsigned char*>(pages);
  const ibv_mr* const pages_mr = need(reg(pd, bytes, pages_bytes, access), "ibv_reg_mr of 64 KiB");
  write_and_check("an RDMA WRITE of 32 KiB", qp, cq, pages_mr, bytes, bytes + pages_bytes / 2, pages_bytes / 2);
}

[[noreturn]] void child(const std::string& library, const std::string& socket, const std::string& name, int report_fd, int go_fd) {
  ::signal(SIGALRM, SIG_DFL);
  ::alarm(watchdog_s);
  ::setenv("VRDMA_SOCKET", socket.c_str(), 1);
  ::setenv("VRDMA_NAME", name.c_str(), 1);
  const int null = ::open("/dev/null", O_WRONLY | O_CLOEXEC);
  if (null >= 0) ::dup2(null, STDERR_FILENO);  // what it would say is in the report
  Report report{};
  try {
    exercise(library);
  } catch (const Failure& failure) {
    std::strncpy(report.failed_at, failure.at.c_str(), sizeof(report.failed_at) - 1);
    std::strncpy(report.error, failure.error.c_str(), sizeof(report.error) - 1);
  }
  char go;
  if (::write(report_fd, &report, sizeof(report)) == static_cast<ssize_t>(sizeof(report))) {
    [[maybe_unused]] const auto ignored = ::read(go_fd, &go, 1);  // ends when the parent has looked
  }
  ::_exit(0);
}

void find_paths(const std::string& socket, const std::string& name, SelfTestResult& result) try {
  const auto service = find_service(socket);
  if (!service) return;
  const auto state = query(*service);
  for (const auto& guest : state.at("guests")) {
    if (guest.at("name") != name) continue;
    for (const auto& mr : guest.at("mrs")) (mr.at("bytes") == pages_bytes ? result.pages_path : result.small_path) = mr.at("path");
  }
} catch (const std::exception&) {
  // Only the way is unknown then; that it works is known.
}

}  // namespace

SelfTestResult self_test(const std::string& library, const std::string& socket) {
  int report_ends[2], go_ends[2];
  if (::pipe2(report_ends, O_CLOEXEC) != 0) return {"making a pipe", std::strerror(errno), {}, {}};
  vmci::UniqueFd report_read(report_ends[0]), report_write(report_ends[1]);
  if (::pipe2(go_ends, O_CLOEXEC) != 0) return {"making a pipe", std::strerror(errno), {}, {}};
  vmci::UniqueFd go_read(go_ends[0]), go_write(go_ends[1]);
  const std::string name = fmt::format("vrdma-doctor-{}", ::getpid());
  const pid_t pid = ::fork();
  if (pid < 0) return {"starting a process", std::strerror(errno), {}, {}};
  if (pid == 0) {
    go_write.reset();
    child(library, socket, name, report_write.get(), go_read.get());
  }
  report_write.reset();
  go_read.reset();
  Report report{};
  ssize_t got;
  do got = ::read(report_read.get(), &report, sizeof(report));
  while (got < 0 && errno == EINTR);
  SelfTestResult result;
  const bool reported = got == static_cast<ssize_t>(sizeof(report));
  if (reported) {
    result.failed_at = report.failed_at;
    result.error = report.error;
    if (result.failed_at.empty()) find_paths(socket, name, result);
  }
  go_write.reset();
  int status = 0;
  while (::waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  if (!reported) {
    result.failed_at = "using the library";
    result.error = WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM ? fmt::format("it was not done after {} s", watchdog_s)
                   : WIFSIGNALED(status) ? fmt::format("killed by signal {} ({})", WTERMSIG(status), ::strsignal(WTERMSIG(status)))
                                         : fmt::format("the process ended with code {}", WEXITSTATUS(status));
  }
  return result;
}

}  // namespace vrdma::cli
