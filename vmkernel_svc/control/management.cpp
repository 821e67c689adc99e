// Management datagrams: each request is the management's to answer.
#include "vmkernel_svc/control/desk.hpp"
#include "vmkernel_svc/mad/management.hpp"

namespace vrdma::svc {

using namespace control;

template <>
Result<Empty> ControlDesk::on<Request::mad_close>(Guest& guest, const MadChannelRequest& request) {
  return as_reply(fabric_.management->close(guest, request.channel));
}
template <>
Result<MadAgent> ControlDesk::on<Request::mad_register>(Guest& guest, const MadRegisterRequest& request) {
  return fabric_.management->add_agent(guest, request);
}
template <>
Result<Empty> ControlDesk::on<Request::mad_unregister>(Guest& guest, const MadAgent& agent) {
  return as_reply(fabric_.management->remove_agent(guest, agent));
}
template <>
Result<Empty> ControlDesk::on<Request::mad_send>(Guest& guest, const MadSendRequest& request) {
  return as_reply(fabric_.management->send(guest, request));
}
template <>
Result<MadTakeReply> ControlDesk::on<Request::mad_take>(Guest& guest, const MadTakeRequest& request) {
  return fabric_.management->take(guest, request);
}

}  // namespace vrdma::svc
