/* A test double of NCCL (libnccl.so.2) over the double of the CUDA driver: processes of one machine, real bytes, real streams.
 *
 * Whatever is put on a stream runs on it, see cuda.c. Grouped sends and receives progress together, those of one pair match in
 order, and
 * sizes must agree; a group that can't complete fails the communicator after FAKENCCL_TIMEOUT seconds (20). Puts must lie in a
 registered
 * window at both ends. Bytes go by process_vm_readv and writev, so ranks must be allowed to trace each other (same user).
 * FAKENCCL_CORRUPT=",2:6,1:3," turns a bit in the 6th message that rank 2 receives, or puts, and in rank 1's 3rd; those of a byte
 * don't count.
 * A group is a kernel that holds an SM for each channel of its communicator (config.maxCTAs, else 32) until it ends; where those of a
 * rank's kernels are more than the GPU's 132, it fails: on a GPU a kernel may then never start that others wait for.
 * With config.blocking = 0 a call may say ncclInProgress, as the library does. FAKENCCL_VERSION is what ncclGetVersion tells.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))
#define MAX_RANKS 64
#define MAX_WINDOWS 256
#define MAX_SIGNALS 16
#define N_SMS 132
enum { SUCCESS = 0, SYSTEM_ERROR = 2, INTERNAL_ERROR = 3, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, REMOTE_ERROR = 6 };

typedef struct { char text[128]; } UniqueId;
typedef struct { volatile uint64_t posted, done, address, bytes; volatile int process; } Channel;
typedef struct { volatile uint64_t address, bytes; volatile int process, registered; } Window;
typedef struct {
  volatile int arrived, generation;         /* of calls that block */
  volatile int coming, turn;                /* of collectives on streams */
  volatile int color[MAX_RANKS], key[MAX_RANKS], process[MAX_RANKS];
  volatile uint64_t input[MAX_RANKS];
  Channel channel[MAX_RANKS][MAX_RANKS];    /* [source][destination] */
  Window window[MAX_WINDOWS][MAX_RANKS];
  volatile uint64_t signal[MAX_RANKS][MAX_RANKS][MAX_SIGNALS]; /* [destination][source] */
} Shared;
typedef struct Comm {
  int n, rank, n_windows, n_splits, magic, ctas;
  volatile int error, aborted;
  Shared *shared;
  char name[100], words[256];
  uint64_t seen[MAX_RANKS][MAX_SIGNALS];
  pthread_mutex_t lock;
} Comm;
typedef enum { SEND, RECEIVE, PUT, WAIT, ALL_GATHER, BROADCAST, REDUCE, REDUCE_SCATTER, ALL_REDUCE } Kind;
typedef struct { Kind kind; Comm *comm; const void *from; void *to; size_t bytes, offset; int peer, window, signal, count, type, state; } Op;
typedef struct { int n; Op *ops; } Group;
typedef struct { int op_count, peer, signal, context; } WaitDesc;

extern int cuLaunchHostFunc(void *stream, void (*run)(void *), void *arg);
extern int cuMemAlloc(uint64_t *out, size_t n);
extern int cuMemFree(uint64_t p);

static __thread int depth, n_queued, room;
static __thread Op *queued;
static __thread void *queued_stream;
static __thread char words[256];

static double now_s(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + 1e-9 * t.tv_nsec; }
static double timeout_s(void) { const char *text = getenv("FAKENCCL_TIMEOUT"); return text ? atof(text) : 20; }
static size_t size_of(int type) {
  static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return sizes[type];
}
static int fail(Comm *c, int code, const char *format, ...) {
  va_list rest;
  va_start(rest, format);
  vsnprintf(words, sizeof words, format, rest);
  va_end(rest);
  if (c) { memcpy(c->words, words, sizeof words); c->error = code; }
  return code;
}

static int move_bytes(int writes, int process, void *here, uint64_t there, size_t n) {
  if (process == getpid()) { if (writes) memmove((void *)there, here, n); else memmove(here, (void *)there, n); return 0; }
  for (size_t at = 0; at < n;) {
    struct iovec a = {(char *)here + at, n - at}, b = {(void *)(there + at), n - at};
    ssize_t k = writes ? process_vm_writev(process, &a, 1, &b, 1, 0) : process_vm_readv(process, &a, 1, &b, 1, 0);
    if (k <= 0) return errno ? errno : EIO;
    at += (size_t)k;
  }
  return 0;
}

/* Whether this message is to be corrupted. */
static int is_hurt(Comm *c, size_t n) {
  static int n_messages;
  const char *text = getenv("FAKENCCL_CORRUPT");
  char wanted[32];
  if (!text || n < 2) return 0;
  snprintf(wanted, sizeof wanted, ",%d:%d,", c->rank, __sync_add_and_fetch(&n_messages, 1));
  return strstr(text, wanted) != NULL;
}

static int line_up(Comm *c, volatile int *arrived, volatile int *turn) {
  int now = *turn;
  double until = now_s() + timeout_s();
  int n_looks = 0;
  if (__sync_add_and_fetch(arrived, 1) == c->n) { *arrived = 0; __sync_synchronize(); *turn = now + 1; return SUCCESS; }
  while (*turn == now) {
    if (c->aborted) return INTERNAL_ERROR;
    if (now_s() > until) return fail(c, REMOTE_ERROR, "rank %d of %d waited for the others of a collective call", c->rank, c->n);
    usleep(++n_looks > 200 ? 500 : 50);
  }
  return SUCCESS;
}

static float bf16(uint16_t bits) { union { uint32_t u; float f; } x = {.u = (uint32_t)bits << 16}; return x.f; }
static uint16_t to_bf16(float f) { union { float f; uint32_t u; } x = {.f = f}; return (uint16_t)((x.u + 0x7FFF + ((x.u >> 16) & 1)) >> 16); }
static void add(void *into, const void *from, size_t n, int type) {
  for (size_t i = 0; i < n; i++) switch (type) {
    case 7: ((float *)into)[i] += ((const float *)from)[i]; break;
    case 8: ((double *)into)[i] += ((const double *)from)[i]; break;
    case 6: ((_Float16 *)into)[i] += ((const _Float16 *)from)[i]; break;
    case 9: ((uint16_t *)into)[i] = to_bf16(bf16(((uint16_t *)into)[i]) + bf16(((const uint16_t *)from)[i])); break;
    case 2: case 3: ((int32_t *)into)[i] += ((const int32_t *)from)[i]; break;
    default: ((uint8_t *)into)[i] += ((const uint8_t *)from)[i];
  }
}

static int collective(Op *o) {
  Comm *c = o->comm;
  Shared *s = c->shared;
  s->input[c->rank] = (uint64_t)o->from;
  s->process[c->rank] = getpid();
  __sync_synchronize();
  int code = line_up(c, &s->coming, &s->turn);
  if (code) return code;
  char *part = malloc(o->bytes + 1), *sum = calloc(1, o->bytes + 1);
  int wanted = o->kind != REDUCE || o->peer == c->rank, bad = 0;
  for (int r = 0; r < c->n && wanted && !bad; r++) {
    uint64_t from = s->input[r];
    if (o->kind == ALL_GATHER) bad = move_bytes(0, s->process[r], (char *)o->to + (size_t)r * o->bytes, from, o->bytes);
    else if (o->kind == BROADCAST) { if (r == o->peer) bad = move_bytes(0, s->process[r], sum, from, o->bytes); }
    else {
      bad = move_bytes(0, s->process[r], part, from + (o->kind == REDUCE_SCATTER ? (size_t)c->rank * o->bytes : 0), o->bytes);
      add(sum, part, o->bytes / size_of(o->type), o->type);
    }
  }
  if (!bad) code = line_up(c, &s->coming, &s->turn); /* all have read before anyone writes over its input */
  if (!bad && !code && wanted && o->kind != ALL_GATHER) memcpy(o->to, sum, o->bytes);
  free(part);
  free(sum);
  return bad ? fail(c, SYSTEM_ERROR, "reading of a peer's memory: %s", strerror(bad)) : code;
}

/* One attempt at an operation: 1 done, 0 not yet, below 0 failed. */
static int attempt(Op *o, int *sends_before, int *receives_before) {
  Comm *c = o->comm;
  Shared *s = c->shared;
  switch (o->kind) {
  case SEND: {
    Channel *h = &s->channel[c->rank][o->peer];
    if (!o->state) {
      if (*sends_before || h->posted != h->done) return 0;
      h->address = (uint64_t)o->from; h->bytes = o->bytes; h->process = getpid();
      __sync_synchronize();
      h->posted++;
      o->state = 1;
    }
    return h->done == h->posted;
  }
  case RECEIVE: {
    Channel *h = &s->channel[o->peer][c->rank];
    if (*receives_before || h->posted == h->done) return 0;
    if (h->bytes != o->bytes)
      return -fail(c, INVALID_USAGE, "rank %d receives %zu bytes from rank %d, which sends %llu", c->rank, o->bytes, o->peer, (unsigned long long)h->bytes);
    int bad = move_bytes(0, h->process, o->to, h->address, o->bytes);
    if (bad) return -fail(c, SYSTEM_ERROR, "reading of rank %d: %s", o->peer, strerror(bad));
    if (is_hurt(c, o->bytes)) ((char *)o->to)[o->bytes / 2] ^= 0x10;
    __sync_synchronize();
    h->done++;
    return 1;
  }
  case PUT: {
    if (o->bytes) {
      Window *mine = &s->window[o->window][c->rank], *w = &s->window[o->window][o->peer];
      uint64_t from = (uint64_t)o->from;
      if (from < mine->address || from + o->bytes > mine->address + mine->bytes)
        return -fail(c, INVALID_USAGE, "rank %d puts from outside of its window", c->rank);
      if (!w->registered || o->offset + o->bytes > w->bytes)
        return -fail(c, INVALID_USAGE, "rank %d puts %zu bytes at %zu into rank %d's window of %llu", c->rank, o->bytes, o->offset, o->peer, (unsigned long long)w->bytes);
      int bad = move_bytes(1, w->process, (void *)o->from, w->address + o->offset, o->bytes);
      if (bad) return -fail(c, SYSTEM_ERROR, "writing to rank %d: %s", o->peer, strerror(bad));
      if (is_hurt(c, o->bytes)) {
        char turned = ((const char *)o->from)[o->bytes / 2] ^ 0x10;
        move_bytes(1, w->process, &turned, w->address + o->offset + o->bytes / 2, 1);
      }
    }
    __sync_synchronize();
    __sync_add_and_fetch(&s->signal[o->peer][c->rank][o->signal], 1);
    return 1;
  }
  case WAIT:
    if (s->signal[c->rank][o->peer][o->signal] < c->seen[o->peer][o->signal] + (uint64_t)o->count) return 0;
    c->seen[o->peer][o->signal] += (uint64_t)o->count;
    return 1;
  default: {
    int code = collective(o);
    return code ? -code : 1;
  }
  }
}

static void run_group(void *given) {
  static volatile int held;
  Group *g = given;
  int left = g->n, n_looks = 0, ctas = 0;
  char *done = calloc((size_t)g->n, 1);
  double until = now_s() + timeout_s();
  for (int i = 0; i < g->n; i++) if (g->ops[i].kind != PUT && g->ops[i].kind != WAIT && g->ops[i].comm->ctas > ctas) ctas = g->ops[i].comm->ctas;
  int all = __sync_add_and_fetch(&held, ctas);
  if (all > N_SMS) { fail(g->ops[0].comm, INTERNAL_ERROR, "rank %d: kernels that run at once hold %d SMs of %d", g->ops[0].comm->rank, all, N_SMS); goto end; }
  for (int i = 0; i < g->n; i++) g->ops[i].state = 0; /* a captured group runs again */
  while (left) {
    int moved = 0, sends[MAX_RANKS] = {0}, receives[MAX_RANKS] = {0};
    for (int i = 0; i < g->n; i++) {
      Op *o = &g->ops[i];
      if (done[i]) continue;
      if (o->comm->aborted || o->comm->error) goto end;
      int code = attempt(o, &sends[o->peer], &receives[o->peer]);
      if (code < 0) goto end;
      if (code) { done[i] = 1; left--; moved = 1; continue; }
      if (o->kind == SEND) sends[o->peer] = 1;
      if (o->kind == RECEIVE) receives[o->peer] = 1;
    }
    if (moved) n_looks = 0;
    else if (++n_looks > 20) usleep(n_looks > 200 ? 500 : 50);
    if (now_s() > until) {
      fail(g->ops[0].comm, REMOTE_ERROR, "rank %d: %d operations of a group made no progress", g->ops[0].comm->rank, left);
      goto end;
    }
  }
end:
  __sync_sub_and_fetch(&held, ctas);
  free(done);
}

static int flush(void) {
  if (!n_queued) return SUCCESS;
  Group *g = malloc(sizeof *g); /* never freed: it may have been captured */
  g->n = n_queued;
  g->ops = malloc((size_t)n_queued * sizeof *g->ops);
  memcpy(g->ops, queued, (size_t)n_queued * sizeof *g->ops);
  n_queued = 0;
  return cuLaunchHostFunc(queued_stream, run_group, g) ? 1 : SUCCESS;
}

static int push(Op op, void *stream) {
  if (!op.comm || op.comm->magic != 0x4e43) return fail(NULL, INVALID_ARGUMENT, "no communicator");
  if (op.comm->error) return op.comm->error;
  if (op.peer < 0 || op.peer >= op.comm->n) return fail(op.comm, INVALID_ARGUMENT, "there is no rank %d", op.peer);
  if (n_queued && stream != queued_stream) return fail(op.comm, INVALID_USAGE, "a group on two streams, which this double has not");
  if (n_queued == room) queued = realloc(queued, (size_t)(room = room ? 2 * room : 64) * sizeof *queued);
  queued[n_queued++] = op;
  queued_stream = stream;
  return depth ? SUCCESS : flush();
}

API int ncclGetVersion(int *version) { const char *text = getenv("FAKENCCL_VERSION"); *version = text ? atoi(text) : 23203; return SUCCESS; }
API const char *ncclGetErrorString(int code) { return code ? "error of the NCCL double" : "no error"; }
API const char *ncclGetLastError(Comm *c) { return c && c->words[0] ? c->words : words; }
API int ncclGetUniqueId(UniqueId *id) {
  memset(id, 0, sizeof *id);
  snprintf(id->text, 90, "/shardroute-nccl-%d-%lld", getpid(), (long long)(now_s() * 1e9));
  return SUCCESS;
}
static int ctas_of(const void *config) {
  int most = config ? ((const int *)config)[7] : INT32_MIN; /* size_t size; unsigned magic, version; int blocking, cgaClusterSize, minCTAs, maxCTAs */
  return most > 0 ? most : 32;
}
static int open_comm(Comm **out, int n, const char *name, int rank, const void *config) {
  if (n > MAX_RANKS || rank >= n) return fail(NULL, INVALID_ARGUMENT, "rank %d of %d", rank, n);
  Comm *c = calloc(1, sizeof *c);
  c->n = n; c->rank = rank; c->magic = 0x4e43; c->ctas = ctas_of(config);
  snprintf(c->name, sizeof c->name, "%s", name);
  int fd = shm_open(c->name, O_CREAT | O_RDWR, 0600);
  if (fd < 0 || ftruncate(fd, sizeof(Shared))) return fail(NULL, SYSTEM_ERROR, "%s: %s", c->name, strerror(errno));
  c->shared = mmap(NULL, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  int code = line_up(c, &c->shared->arrived, &c->shared->generation);
  if (rank == 0) shm_unlink(c->name);
  *out = c;
  return code;
}
API int ncclCommInitRankConfig(Comm **out, int n, UniqueId id, int rank, void *config) { return open_comm(out, n, id.text, rank, config); }
API int ncclCommInitRank(Comm **out, int n, UniqueId id, int rank) { return open_comm(out, n, id.text, rank, NULL); }
API int ncclCommInitRankScalable(Comm **out, int n, int rank, int k, UniqueId *id, void *config) { (void)k; return open_comm(out, n, id->text, rank, config); }
API int ncclCommSplit(Comm *c, int color, int key, Comm **out, void *config) {
  Shared *s = c->shared;
  s->color[c->rank] = color;
  s->key[c->rank] = key;
  int code = line_up(c, &s->arrived, &s->generation), n = 0, rank = 0;
  for (int r = 0; r < c->n; r++) if (s->color[r] == color) {
    n++;
    rank += s->key[r] < key || (s->key[r] == key && r < c->rank);
  }
  char name[100];
  snprintf(name, sizeof name, "%.60s-%d-%d", c->name, c->n_splits++, color);
  if (!code) code = line_up(c, &s->arrived, &s->generation); /* all have read before a next split writes */
  *out = NULL;
  return code || color < 0 ? code : open_comm(out, n, name, rank, config);
}
/* Those that stay keep their order. Nobody else calls it. */
API int ncclCommShrink(Comm *c, int *exclude, int n_excluded, Comm **out, void *config, int flags) {
  if (!n_excluded || flags) return fail(c, INVALID_ARGUMENT, "a shrink by %d ranks, flags %d", n_excluded, flags);
  if (c->error || c->aborted) return fail(c, INVALID_USAGE, "a shrink of a communicator that has failed");
  int rank = c->rank;
  char name[100];
  for (int i = 0; i < n_excluded; i++) {
    if (exclude[i] < 0 || exclude[i] >= c->n || exclude[i] == c->rank) return fail(c, INVALID_ARGUMENT, "rank %d excludes %d", c->rank, exclude[i]);
    rank -= exclude[i] < c->rank;
  }
  snprintf(name, sizeof name, "%.60s-s%d", c->name, c->n_splits++);
  return open_comm(out, c->n - n_excluded, name, rank, config);
}
API int ncclCommGetUniqueId(Comm *c, UniqueId *id) {
  memset(id, 0, sizeof *id);
  snprintf(id->text, 100, "%.60s-g%d", c->name, c->n_splits);
  return SUCCESS;
}
/* Those that were there are the first, in their order; all but their root have no id, and find each other by what they had. */
API int ncclCommGrow(Comm *c, int n, UniqueId *id, int rank, Comm **out, void *config) {
  (void)config;
  char name[128];
  if (!c) return !id || rank < 1 ? fail(NULL, INVALID_ARGUMENT, "who comes needs an id and a rank") : open_comm(out, n, id->text, rank, NULL);
  if (n <= c->n || rank != -1 || (c->rank == 0) != (id != NULL)) return fail(c, INVALID_ARGUMENT, "rank %d of %d grows to %d", c->rank, c->n, n);
  snprintf(name, sizeof name, "%.60s-g%d", c->name, c->n_splits++);
  return open_comm(out, n, name, c->rank, NULL);
}
API int ncclCommFinalize(Comm *c) { (void)c; return SUCCESS; }
API int ncclCommDestroy(Comm *c) { c->aborted = 1; return SUCCESS; } /* streams may still look at it */
API int ncclCommAbort(Comm *c) { c->aborted = 1; return SUCCESS; }
API int ncclCommGetAsyncError(Comm *c, int *code) { *code = c->error; return SUCCESS; }
API int ncclCommCount(Comm *c, int *n) { *n = c->n; return SUCCESS; }
API int ncclCommUserRank(Comm *c, int *rank) { *rank = c->rank; return SUCCESS; }
API int ncclCommCuDevice(Comm *c, int *device) { (void)c; *device = 0; return SUCCESS; }
API int ncclMemAlloc(void **out, size_t n) { return cuMemAlloc((uint64_t *)out, n) ? 1 : SUCCESS; }
API int ncclMemFree(void *p) { return cuMemFree((uint64_t)p) ? 1 : SUCCESS; }
API int ncclGroupStart(void) { depth++; return SUCCESS; }
API int ncclGroupEnd(void) { return depth <= 0 ? INVALID_USAGE : --depth ? SUCCESS : flush(); }
API int ncclSend(const void *p, size_t n, int t, int peer, Comm *c, void *stream) { return push((Op){.kind = SEND, .comm = c, .from = p, .bytes = n * size_of(t), .peer = peer}, stream); }
API int ncclRecv(void *p, size_t n, int t, int peer, Comm *c, void *stream) { return push((Op){.kind = RECEIVE, .comm = c, .to = p, .bytes = n * size_of(t), .peer = peer}, stream); }
API int ncclAllGather(const void *a, void *b, size_t n, int t, Comm *c, void *stream) { return push((Op){.kind = ALL_GATHER, .comm = c, .from = a, .to = b, .bytes = n * size_of(t)}, stream); }
API int ncclBroadcast(const void *a, void *b, size_t n, int t, int root, Comm *c, void *stream) { return push((Op){.kind = BROADCAST, .comm = c, .from = a, .to = b, .bytes = n * size_of(t), .peer = root}, stream); }
API int ncclReduce(const void *a, void *b, size_t n, int t, int op, int root, Comm *c, void *stream) { return op ? INVALID_ARGUMENT : push((Op){.kind = REDUCE, .comm = c, .from = a, .to = b, .bytes = n * size_of(t), .type = t, .peer = root}, stream); }
API int ncclReduceScatter(const void *a, void *b, size_t n, int t, int op, Comm *c, void *stream) { return op ? INVALID_ARGUMENT : push((Op){.kind = REDUCE_SCATTER, .comm = c, .from = a, .to = b, .bytes = n * size_of(t), .type = t}, stream); }
API int ncclAllReduce(const void *a, void *b, size_t n, int t, int op, Comm *c, void *stream) { return op ? INVALID_ARGUMENT : push((Op){.kind = ALL_REDUCE, .comm = c, .from = a, .to = b, .bytes = n * size_of(t), .type = t}, stream); }
/* A window's handle is its number + 1. */
API int ncclCommWindowRegister(Comm *c, void *p, size_t n, void **out, int flags) {
  if (flags != 1 || (uint64_t)p % 4096) return fail(c, INVALID_ARGUMENT, "windows are symmetric, at addresses of 4096 bytes");
  Window *w = &c->shared->window[c->n_windows][c->rank];
  w->process = getpid(); w->address = (uint64_t)p; w->bytes = n;
  __sync_synchronize();
  w->registered = 1;
  *out = (void *)(intptr_t)++c->n_windows;
  return line_up(c, &c->shared->arrived, &c->shared->generation);
}
API int ncclCommWindowDeregister(Comm *c, void *window) { (void)c; (void)window; return SUCCESS; }
API int ncclPutSignal(const void *p, size_t n, int t, int peer, void *window, size_t offset, int signal, int context, unsigned flags, Comm *c, void *stream) {
  if (!window || signal < 0 || signal >= MAX_SIGNALS || context || flags) return fail(c, INVALID_ARGUMENT, "a put without window or signal");
  return push((Op){.kind = PUT, .comm = c, .from = p, .bytes = n * size_of(t), .peer = peer, .window = (int)(intptr_t)window - 1, .offset = offset, .signal = signal}, stream);
}
API int ncclSignal(int peer, int signal, int context, unsigned flags, Comm *c, void *stream) {
  if (signal < 0 || signal >= MAX_SIGNALS || context || flags) return fail(c, INVALID_ARGUMENT, "signal %d", signal);
  return push((Op){.kind = PUT, .comm = c, .peer = peer, .signal = signal}, stream);
}
API int ncclWaitSignal(int n, WaitDesc *given, Comm *c, void *stream) {
  depth++;
  int code = SUCCESS;
  for (int i = 0; i < n && !code; i++)
    code = push((Op){.kind = WAIT, .comm = c, .peer = given[i].peer, .signal = given[i].signal, .count = given[i].op_count}, stream);
  depth--;
  return code || depth ? code : flush();
}

/* A CUDA build of torch doesn't load without these; nobody calls them. */
#define UNUSED(name) API int name(void) { return fail(NULL, INVALID_USAGE, #name " is not part of this double"); }
UNUSED(ncclBcast) UNUSED(ncclCommDeregister) UNUSED(ncclCommInitAll) UNUSED(ncclCommRegister)
UNUSED(ncclRedOpCreatePreMulSum) UNUSED(ncclRedOpDestroy)
