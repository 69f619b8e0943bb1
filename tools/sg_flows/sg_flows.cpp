// Runs flows through SimGrid's fluid network model, to compare its finish times and its cost with ours.
//
//     sg_flows FLOWS FINISH
//
// FLOWS is text: "n_links n_flows"; a capacity for each link; for each flow "start delay amount cap n_route links... n_deps
// flows...", a cap of 0 meaning none. A flow is ready at its start or when the flows it waits for are done, whichever is later,
// waits its delay without using a link, and then moves its amount over its links at its max-min fair share. FINISH gets a finish
// time a line. Standard output gets "cpu_s peak_kB": seconds to simulate, without reading and building, and memory in all.
//
// Why it is as it is. SimGrid weighs flows by the latency of their route, so links have latency 0 and a timer pays the delay. All
// routes end in one sink and begin in a host for each route, because a star zone lets a host's route be any list of links. A cap is
// a link of the flow's own: set_rate is refused, or ignored, by transfers between hosts. For SimGrid 3.32, Debian's libsimgrid-dev.
#include <simgrid/kernel/Timer.hpp>
#include <simgrid/s4u.hpp>

#include <sys/resource.h>

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <fstream>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

namespace sg = simgrid::s4u;

struct Flow {
  double start, delay, amount, cap;
  std::vector<int> waiting;  // flows that wait for this one
  int n_missing;
  sg::Host* source;
  sg::CommPtr transfer;
  double finish = -1;
};

static std::vector<Flow> flows;
static std::unordered_map<const sg::Activity*, int> flow_of;
static sg::Host* sink;

static void transfer(int i)
{
  Flow& flow = flows[i];
  flow.transfer = sg::Comm::sendto_init(flow.source, sink);
  flow.transfer->set_payload_size(static_cast<uint64_t>(flow.amount));
  flow_of[flow.transfer.get()] = i;
  flow.transfer->start();
}

static void make_ready(int i)
{
  const double begin = std::max(sg::Engine::get_clock(), flows[i].start) + flows[i].delay;
  if (begin <= sg::Engine::get_clock())
    transfer(i);
  else
    simgrid::kernel::timer::Timer::set(begin, [i] { transfer(i); });
}

static void note_end(const sg::Activity& activity)
{
  const auto found = flow_of.find(&activity);
  if (found == flow_of.end())
    return;
  const int i = found->second;
  flow_of.erase(found);
  flows[i].finish = sg::Engine::get_clock();
  for (int waiting : flows[i].waiting)
    if (--flows[waiting].n_missing == 0)
      make_ready(waiting);
}

static std::vector<int> read_list(std::ifstream& in)
{
  size_t n = 0;
  in >> n;
  std::vector<int> list(n);
  for (int& item : list)
    in >> item;
  return list;
}

int main(int argc, char** argv)
{
  sg::Engine engine(&argc, argv);
  // Pure max-min: no TCP window, no cross traffic, no correction factors, and comparisons near the precision of a double.
  for (const char* setting : {"network/model:CM02", "network/crosstraffic:0", "network/TCP-gamma:0", "network/weight-S:0",
                              "network/bandwidth-factor:1", "network/latency-factor:1", "surf/precision:1e-12", "maxmin/precision:1e-9"})
    engine.set_config(setting);
  if (argc != 3) {
    std::fprintf(stderr, "usage: sg_flows FLOWS FINISH\n");
    return 2;
  }
  std::ifstream in(argv[1]);
  size_t n_links = 0, n_flows = 0;
  in >> n_links >> n_flows;
  auto* zone = sg::create_star_zone("zone");
  std::vector<sg::Link*> links(n_links);
  for (size_t i = 0; i < n_links; i++) {
    double capacity = 0;
    in >> capacity;
    links[i] = zone->create_link("link" + std::to_string(i), capacity)->set_latency(0)->seal();
  }
  flows.resize(n_flows);
  std::map<std::vector<int>, sg::Host*> sources;
  for (size_t i = 0; i < n_flows; i++) {
    Flow& flow = flows[i];
    in >> flow.start >> flow.delay >> flow.amount >> flow.cap;
    std::vector<int> route = read_list(in);
    const std::vector<int> deps = read_list(in);
    if (flow.cap > 0) {
      route.push_back(static_cast<int>(links.size()));
      links.push_back(zone->create_link("cap" + std::to_string(i), flow.cap)->set_latency(0)->seal());
    }
    flow.n_missing = static_cast<int>(deps.size());
    for (int dep : deps)
      flows[dep].waiting.push_back(static_cast<int>(i));
    sg::Host*& source = sources[route];
    if (source == nullptr) {
      source = zone->create_host("host" + std::to_string(sources.size()), 1e9)->seal();
      std::vector<sg::LinkInRoute> up;
      for (int link : route)
        up.emplace_back(links[link]);
      zone->add_route(source->get_netpoint(), nullptr, nullptr, nullptr, up, false);
    }
    flow.source = source;
  }
  if (!in) {
    std::fprintf(stderr, "sg_flows: %s: ends early or isn't a file of flows\n", argv[1]);
    return 2;
  }
  sink = zone->create_host("sink", 1e9)->seal();
  zone->add_route(nullptr, sink->get_netpoint(), nullptr, nullptr, {}, false);
  zone->seal();
  sg::Activity::on_completion_cb(note_end);

  const std::clock_t cpu_start = std::clock();
  for (size_t i = 0; i < n_flows; i++)
    if (flows[i].n_missing == 0)
      make_ready(static_cast<int>(i));
  engine.run();
  const double cpu_s = static_cast<double>(std::clock() - cpu_start) / CLOCKS_PER_SEC;
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);

  std::FILE* out = std::fopen(argv[2], "w");
  for (const Flow& flow : flows)
    std::fprintf(out, "%.17g\n", flow.finish);
  std::fclose(out);
  std::printf("%.9g %ld\n", cpu_s, usage.ru_maxrss);
  std::fflush(stdout);
  std::_Exit(0);  // taking a hundred thousand hosts down would take longer than the run
}
