// Two hosts on one machine, for tests.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <vector>

namespace leeway {

// Two network namespaces with a link between them that can be cut. Their names have the process's
// number; they go with this object.
class LinkedNamespaces {
 public:
  static constexpr const char* kNear = "10.213.7.1";
  static constexpr const char* kFar = "10.213.7.2";

  LinkedNamespaces() {
    made_ = ip("netns add " + near_) && ip("netns add " + far_) &&
            ip("link add near netns " + near_ + " type veth peer name far netns " + far_) &&
            ip("-n " + near_ + " addr add " + kNear + "/24 dev near") &&
            ip("-n " + far_ + " addr add " + kFar + "/24 dev far") &&
            ip("-n " + near_ + " link set near up") && ip("-n " + far_ + " link set far up") &&
            ip("-n " + near_ + " link set lo up");
  }
  ~LinkedNamespaces() {
    ip("netns del " + near_);
    ip("netns del " + far_);
  }
  LinkedNamespaces(const LinkedNamespaces&) = delete;
  LinkedNamespaces& operator=(const LinkedNamespaces&) = delete;

  bool made() const { return made_; }
  void link(bool up) const {
    EXPECT_TRUE(ip("-n " + far_ + " link set far " + (up ? "up" : "down")));
  }
  // A second link, between interfaces of the same names with a 2.
  bool add_second() const {
    return ip("link add near2 netns " + near_ + " type veth peer name far2 netns " + far_) &&
           ip("-n " + near_ + " addr add 10.213.8.1/24 dev near2") &&
           ip("-n " + far_ + " addr add 10.213.8.2/24 dev far2") &&
           ip("-n " + near_ + " link set near2 up") && ip("-n " + far_ + " link set far2 up");
  }
  void cut_second() const { EXPECT_TRUE(ip("-n " + far_ + " link set far2 down")); }
  // What runs a program in one of them.
  std::vector<std::string> in_near() const { return in(near_); }
  std::vector<std::string> in_far() const { return in(far_); }

 private:
  static bool ip(const std::string& words) {
    return std::system(("ip " + words + " > /dev/null 2>&1").c_str()) == 0;
  }
  static std::vector<std::string> in(const std::string& name) {
    return {"/usr/bin/env", "ip", "netns", "exec", name};
  }

  std::string near_ = "leeway_near_" + std::to_string(::getpid());
  std::string far_ = "leeway_far_" + std::to_string(::getpid());
  bool made_ = false;
};

}  // namespace leeway
