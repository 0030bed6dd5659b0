// How ranks find each other. Every process has one listener; a communicator's root collects the others there and tells everybody
// who is who, like the root info exchange of HCCL.
#pragma once

#include <memory>
#include <vector>

#include "mesh.h"

namespace hccl_sim {

// What HcclRootInfo carries.
struct Root {
  uint64_t magic;
  char id[16];
  Member member;
};

Id random_id();
// This process as a member of a communicator, its listener started. Throws a Failure.
Member myself(int physical_device);
Root make_root(const Id& id, const Member& member);
// Joins the communicator of `root` as `rank`; returns its mesh, and the members in rank order. Throws a Failure.
std::unique_ptr<Mesh> join(const Root& root, int rank, int ranks, const Member& me, std::vector<Member>* members);
// The connection that `peer` made for communicator `id`, -1 when it does not come in time.
int take_link(const Id& id, int peer, uint64_t deadline_ns);

}  // namespace hccl_sim
