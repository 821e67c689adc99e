// rdma_cm: each request is the connection manager's to answer.
#include <utility>

#include "vmkernel_svc/cm/connection_manager.hpp"
#include "vmkernel_svc/control/desk.hpp"

namespace vrdma::svc {

using namespace control;

template <>
Result<Empty> ControlDesk::on<Request::cm_close>(Guest& guest, const CmChannelRequest& request) {
  return as_reply(fabric_.cm->close(guest, request.channel));
}
template <>
Result<Empty> ControlDesk::on<Request::cm_place>(Guest& guest, const CmPlaceRequest& request) {
  return as_reply(fabric_.cm->place(guest, request));
}
template <>
Result<CmId> ControlDesk::on<Request::cm_create_id>(Guest& guest, const CmCreateRequest& request) {
  return fabric_.cm->create(guest, request);
}
template <>
Result<CmGone> ControlDesk::on<Request::cm_destroy_id>(Guest& guest, const CmId& id) {
  return fabric_.cm->destroy(guest, id);
}
template <>
Result<Empty> ControlDesk::on<Request::cm_bind>(Guest& guest, const CmBindRequest& request) {
  return as_reply(fabric_.cm->bind(guest, request));
}
template <>
Result<Empty> ControlDesk::on<Request::cm_resolve_address>(Guest& guest, const CmResolveAddressRequest& request) {
  return as_reply(fabric_.cm->resolve_address(guest, request));
}
template <>
Result<Empty> ControlDesk::on<Request::cm_resolve_route>(Guest& guest, const CmId& id) {
  return as_reply(fabric_.cm->resolve_route(guest, id));
}
template <>
Result<Empty> ControlDesk::on<Request::cm_listen>(Guest& guest, const CmListenRequest& request) {
  return as_reply(fabric_.cm->listen(guest, request));
}
template <>
Result<Empty> ControlDesk::on<Request::cm_connect>(Guest& guest, const CmConnectRequest& request) {
  return as_reply(fabric_.cm->connect(guest, request));
}
template <>
Result<Empty> ControlDesk::on<Request::cm_accept>(Guest& guest, const CmAcceptRequest& request) {
  return as_reply(fabric_.cm->accept(guest, request));
}
template <>
Result<Empty> ControlDesk::on<Request::cm_reject>(Guest& guest, const CmRejectRequest& request) {
  return as_reply(fabric_.cm->reject(guest, request));
}
template <>
Result<Empty> ControlDesk::on<Request::cm_disconnect>(Guest& guest, const CmId& id) {
  return as_reply(fabric_.cm->disconnect(guest, id));
}
template <>
Result<Empty> ControlDesk::on<Request::cm_is_established>(Guest& guest, const CmId& id) {
  return as_reply(fabric_.cm->established(guest, id));
}
template <>
Result<Empty> ControlDesk::on<Request::cm_option>(Guest& guest, const CmOptionRequest& request) {
  return as_reply(fabric_.cm->set_option(guest, request));
}
template <>
Result<CmQueryReply> ControlDesk::on<Request::cm_query>(Guest& guest, const CmId& id) {
  return fabric_.cm->query(guest, id);
}
template <>
Result<CmAttributesReply> ControlDesk::on<Request::cm_attributes>(Guest& guest, const CmAttributesRequest& request) {
  return fabric_.cm->attributes(guest, request);
}
template <>
Result<CmGone> ControlDesk::on<Request::cm_migrate>(Guest& guest, const CmMigrateRequest& request) {
  return fabric_.cm->migrate(guest, request);
}
template <>
Result<CmId> ControlDesk::on<Request::cm_join>(Guest& guest, const CmJoinRequest& request) {
  return fabric_.cm->join(guest, request);
}
template <>
Result<CmGone> ControlDesk::on<Request::cm_leave>(Guest& guest, const CmId& id) {
  return fabric_.cm->leave_group(guest, id);
}
template <>
Result<Empty> ControlDesk::on<Request::cm_write_event>(Guest& guest, const CmWriteEventRequest& request) {
  return as_reply(fabric_.cm->write_event(guest, request));
}
template <>
Result<CmTakeReply> ControlDesk::on<Request::cm_take_event>(Guest& guest, const CmChannelRequest& request) {
  return fabric_.cm->take_event(guest, request.channel);
}

}  // namespace vrdma::svc
