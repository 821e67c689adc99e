// A service that may have no more memory refuses what is new, and goes on with what there is.
#include <sys/resource.h>

#include <iterator>
#include <sstream>

#include "guest_lib/test/service_fixture.hpp"

using namespace vrdma::test;

namespace {

// Bytes of data, of which the service may have so many more from now on.
void allow(const Service& service, rlim_t more) {
  std::ifstream file("/proc/" + std::to_string(service.pid()) + "/statm");
  rlim_t pages = 0;  // the sixth number (proc_pid_statm(5))
  for (int i = 0; i < 6; ++i) file >> pages;
  REQUIRE(pages != 0);
  const rlimit limit{pages * 4096 + more, RLIM_INFINITY};
  REQUIRE(::prlimit(service.pid(), RLIMIT_DATA, &limit, nullptr) == 0);
}

// The same bytes again and again, which the service has mapped already: until it refuses, or so many times.
std::vector<ibv_mr*> register_often(const Device& device, std::size_t count, int& error) {
  std::vector<ibv_mr*> made;
  error = 0;
  while (made.size() < count) {
    ibv_mr* const mr = ibv_reg_mr(device.pd, device.mr->addr, device.mr->length, IBV_ACCESS_LOCAL_WRITE);
    if (mr == nullptr) return error = errno, made;
    made.push_back(mr);
  }
  return made;
}

}  // namespace

TEST_CASE("A service without memory refuses what is new with ENOMEM, serves what there is, and begins anew when there is more") {
  Service service;
  service.start();
  const Device device;
  const CqPtr cq = make_cq(device);
  const QpPtr requester = make_qp(device, cq.get()), responder = make_qp(device, cq.get());
  connect(requester.get(), responder->qp_num);
  connect(responder.get(), requester->qp_num);

  allow(service, 0);
  int error = 0;
  const auto mrs = register_often(device, 200'000, error);
  CHECK(error == ENOMEM);
  MESSAGE(mrs.size(), " memory regions with what was in reserve");
  CHECK((ibv_create_cq(device.context, 16, nullptr, nullptr, 0) == nullptr && errno == ENOMEM));

  ibv_qp_attr attributes{};
  ibv_qp_init_attr made_with{};
  CHECK(ibv_query_qp(requester.get(), &attributes, IBV_QP_STATE, &made_with) == 0);
  REQUIRE(post_write(requester.get(), device.sge(), reinterpret_cast<std::uintptr_t>(device.memory.data()) + 64, device.mr->rkey) == 0);
  CHECK(collect(cq.get(), 1).front().status == IBV_WC_SUCCESS);

  allow(service, rlim_t{1} << 30);
  ibv_cq* const another = ibv_create_cq(device.context, 16, nullptr, nullptr, 0);
  REQUIRE(another != nullptr);
  CHECK(ibv_destroy_cq(another) == 0);
  for (ibv_mr* mr : mrs) REQUIRE(ibv_dereg_mr(mr) == 0);
}
