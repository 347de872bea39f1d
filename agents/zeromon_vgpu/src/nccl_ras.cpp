// libnccl: RAS, which answers a client about all communicators of the run.
//
// As in NCCL, each process listens on one address, the system picks one of them for a client, and that
// one answers for all. It reads the others' counts from the files of their communicators, so nobody pays
// for a question before it is asked.
#include <netdb.h>
#include <signal.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "machine.h"
#include "memory.h"
#include "nccl.h"

namespace nccl {
namespace {

constexpr const char* kAddress = "localhost:28028";
constexpr int kProtocol = 2;

// What NCCL counts, in its order: no other function.
constexpr Function kCounted[] = {Function::broadcast, Function::reduce, Function::all_gather,
                                 Function::reduce_scatter, Function::all_reduce};

// ---- the answer

// Whether a process can answer its peers: neither ended nor stopped.
bool responds(int pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  std::getline(file, text);
  auto name_end = text.rfind(") ");
  return name_end != std::string::npos &&
         std::string("RSD").find(text[name_end + 2]) != std::string::npos;
}

// Objects of a JSON array, with what follows each.
std::string joined(const std::vector<std::string>& items) {
  std::string text;
  for (const std::string& item : items)
    text += (text.empty() ? "" : ",\n") + item;
  return text;
}

std::string rank_text(const Shared& shared, int place, const std::string& status) {
  std::ostringstream out;
  out << "{\"rank\": " << shared.rank[place]
      << ", \"host\": \"127.0.0.1\", \"pid\": " << shared.pid[place]
      << ", \"cuda_dev\": " << shared.device[place] << ", \"nvml_dev\": " << shared.device[place]
      << ", \"status\": {" << status << "}";
  return out.str();
}

std::string present_rank(const Shared& shared, int place) {
  std::vector<std::string> counts;
  for (Function function : kCounted)
    counts.push_back(std::string("\"") + function_name(function) +
                     "\": " + std::to_string(shared.launched[place][static_cast<int>(function)].load()));
  return rank_text(shared, place,
                   "\"init_state\": 0, \"async_error\": 0, \"finalize_called\": false, "
                   "\"destroy_flag\": false, \"abort_flag\": false") +
         ", \"collective_counts\": {" + joined(counts) + "}}";
}

std::string missing_rank(const Shared& shared, int place, bool responds) {
  return rank_text(shared, place,
                   std::string("\"unresponsive\": ") + (responds ? "false" : "true") +
                       ", \"considered_dead\": false") +
         "}";
}

// "" for a communicator that is not complete yet, and for one that nobody is left of.
std::string communicator_text(const Shared& shared, const std::string& name) {
  int running = shared.running;
  if (!running || shared.joined < running) return "";
  std::vector<std::string> present, missing;
  bool is_used = false;
  for (int place = 0; place < running; ++place) {
    bool answers = responds(shared.pid[place]);
    is_used |= answers;
    if (answers && !shared.left[place])
      present.push_back(present_rank(shared, place));
    else
      missing.push_back(missing_rank(shared, place, answers));
  }
  if (!is_used) return "";
  std::ostringstream out;
  out << "{\"hash\": \"" << comm_hash(name)
      << "\", \"secondary_hash\": \"0x0:0x0\", \"size\": " << shared.size
      << ", \"ranks_count\": " << present.size() << ", \"missing_ranks_count\": " << missing.size()
      << ",\n\"ranks\": [" << joined(present) << "],\n\"missing_ranks\": [" << joined(missing) << "]}";
  return out.str();
}

std::vector<std::string> communicator_texts() {
  std::vector<std::string> found;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(vgpu::folder(), error)) {
    std::string name = entry.path().filename();
    std::size_t bytes = entry.file_size(error);
    if (name.rfind(kCommFile, 0) != 0 || error || bytes < sizeof(Shared)) continue;
    void* mapped = vgpu::map_file(entry.path(), bytes, false);
    if (!mapped) continue;
    std::string text =
        communicator_text(*static_cast<Shared*>(mapped), name.substr(std::strlen(kCommFile)));
    munmap(mapped, bytes);
    if (!text.empty()) found.push_back(text);
  }
  return found;
}

std::string status_text() {
  vgpu::Time started = vgpu::now();
  std::vector<std::string> communicators = communicator_texts();
  char timestamp[32] = "";
  std::time_t seconds = std::time(nullptr);
  std::tm parts{};
  std::strftime(timestamp, sizeof timestamp, "%F %T", localtime_r(&seconds, &parts));
  std::ostringstream out;
  out << "{\"nccl_version\": \"" << kVersion / 10000 << "." << kVersion / 100 % 100 << "."
      << kVersion % 100 << "\", \"cuda_runtime_version\": " << VGPU_CUDA_VERSION
      << ", \"cuda_driver_version\": " << static_cast<int>(vgpu::machine().driver_version)
      << ", \"timestamp\": \"" << timestamp << "\", \"communicators_count\": " << communicators.size()
      << ",\n\"communicators\": [" << joined(communicators)
      << "],\n\"ras\": {\"collection_time_sec\": " << static_cast<double>(vgpu::now() - started) / 1e9
      << ", \"timeouts_count\": 0}}\n";
  return out.str();
}

// ---- the protocol: lines of text, in any case

bool begins_with(const std::string& line, const char* word) {
  return strncasecmp(line.c_str(), word, std::strlen(word)) == 0;
}

struct Client {
  int socket;
  bool wants_json = false;

  void send_text(const std::string& text) const {
    for (std::size_t sent = 0; sent < text.size();) {
      ssize_t size = send(socket, text.data() + sent, text.size() - sent, MSG_NOSIGNAL);
      if (size <= 0) return;
      sent += static_cast<std::size_t>(size);
    }
  }

  // False once the client has its answer: RAS then closes the connection.
  bool obey(const std::string& line) {
    if (begins_with(line, "client protocol ")) {
      send_text("SERVER PROTOCOL " + std::to_string(kProtocol) + "\n");
    } else if (begins_with(line, "timeout ")) {
      send_text("OK\n");  // nothing takes long here
    } else if (begins_with(line, "set format ")) {
      std::string format = line.substr(std::strlen("set format "));
      wants_json = !strcasecmp(format.c_str(), "json");
      bool is_known = wants_json || !strcasecmp(format.c_str(), "text");
      send_text(is_known ? "OK\n" : "ERROR: Invalid format " + format + "\n");
    } else if (!strcasecmp(line.c_str(), "status") || !strcasecmp(line.c_str(), "verbose status")) {
      send_text(wants_json ? status_text() : "ERROR: the text of RAS has no model, SET FORMAT json\n");
      return false;
    } else {
      send_text("ERROR: Unknown command " + line + "\n");
    }
    return true;
  }
};

void serve(int socket) {
  Client client{socket};
  std::string text;
  char buffer[1024];
  for (bool is_open = true; is_open;) {
    ssize_t size = recv(socket, buffer, sizeof buffer, 0);
    if (size <= 0) break;
    text.append(buffer, static_cast<std::size_t>(size));
    for (std::size_t end; is_open && (end = text.find('\n')) != std::string::npos;) {
      std::string line = text.substr(0, end);
      text.erase(0, end + 1);
      if (!line.empty() && line.back() == '\r') line.pop_back();
      is_open = client.obey(line);
    }
  }
  close(socket);
}

void accept_always(int listening) {
  while (true) {
    int socket = accept4(listening, nullptr, nullptr, SOCK_CLOEXEC);
    if (socket >= 0) std::thread(serve, socket).detach();
  }
}

int listen_at(const std::string& address) {
  auto colon = address.rfind(':');
  if (colon == std::string::npos) return -1;
  std::string host = address.substr(0, colon), port = address.substr(colon + 1);
  if (host.size() > 1 && host.front() == '[') host = host.substr(1, host.size() - 2);
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  if (getaddrinfo(host.c_str(), port.c_str(), &hints, &found) != 0) return -1;
  int listening = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;
  setsockopt(listening, SOL_SOCKET, SO_REUSEPORT, &on, sizeof on);  // shared by the processes of a node
  bool is_bound = bind(listening, found->ai_addr, found->ai_addrlen) == 0 && listen(listening, 128) == 0;
  freeaddrinfo(found);
  if (is_bound) return listening;
  close(listening);
  return -1;
}

bool start() {
  if (const char* enabled = std::getenv("NCCL_RAS_ENABLE"); enabled && std::atoi(enabled) == 0)
    return false;
  const char* address = std::getenv("NCCL_RAS_ADDR");
  int listening = listen_at(address ? address : kAddress);
  if (listening < 0) return false;  // NCCL, too, goes on without
  sigset_t all, old;                // signals are for the threads of the program
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, &old);
  std::thread(accept_always, listening).detach();
  pthread_sigmask(SIG_SETMASK, &old, nullptr);
  return true;
}

}  // namespace

void start_ras() { [[maybe_unused]] static const bool is_on = start(); }

}  // namespace nccl
