/* A test double of NVSHMEM (libnvshmem_host.so.3) over the double of the CUDA driver: processes of one machine, real bytes and streams.
 *
 * The symmetric heaps of all PEs lie in one shared file, FAKENVSHMEM_HEAP bytes each (16 GiB; untouched pages cost nothing). PEs
 reach each
 * other's heaps within groups of FAKENVSHMEM_DOMAIN (all). A signal that doesn't come within FAKENVSHMEM_TIMEOUT seconds (20)
 * ends the process. FAKENVSHMEM_CORRUPT=",2:6," turns a bit in the 6th put of PE 2, as in the double of NCCL.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))
#define MAX_PES 64
#define MAX_TEAMS 64
#define CONTROL_BYTES 65536
typedef struct { volatile int arrived, generation; volatile uint64_t src[MAX_PES], dst[MAX_PES]; } Control; /* [0] of all, [k] of team k */
typedef struct { int start, apart, n; } Team;
typedef struct { int version; char text[124]; } UniqueId;
typedef struct { int version; UniqueId *id; int rank, n_ranks; } UniqueIdArgs;
typedef struct { int version; void *mpi; UniqueIdArgs unique; char rest[104]; } Attributes;
typedef enum { PUT, SIGNAL, WAIT, SUM, SUM_SCATTER } Kind;
typedef enum { FLOAT, DOUBLE, HALF, BFLOAT16 } Type;
typedef struct { Kind kind; void *to; const void *from; size_t n; volatile uint64_t *word; uint64_t value; int op, peer, team; Type type; } Op;

extern int cuLaunchHostFunc(void *stream, void (*run)(void *), void *arg);

static int rank = -1, n_ranks, ready;
static char *base[MAX_PES];
static Control *control;
static Team teams[MAX_TEAMS];
static int n_teams = 1;
static size_t heap_bytes, used = 512;

static double now_s(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + 1e-9 * t.tv_nsec; }
static double option(const char *name, double otherwise) { const char *text = getenv(name); return text ? atof(text) : otherwise; }
static void line_up_in(Control *c, int n) {
  int now = c->generation;
  double until = now_s() + option("FAKENVSHMEM_TIMEOUT", 20);
  if (__sync_add_and_fetch(&c->arrived, 1) == n) { c->arrived = 0; __sync_synchronize(); c->generation = now + 1; return; }
  for (int looks = 0; c->generation == now;) {
    usleep(++looks > 200 ? 500 : 50);
    if (c != control && now_s() > until) { fprintf(stderr, "NVSHMEM double: PE %d waited for the others of a reduction\n", rank); abort(); }
  }
}
static void line_up(void) { line_up_in(control, n_ranks); }
static char *at(const void *p, int pe) {
  size_t offset = (size_t)((const char *)p - base[rank]);
  if ((const char *)p < base[rank] || offset >= heap_bytes) { fprintf(stderr, "NVSHMEM double: PE %d: %p is not symmetric\n", rank, p); abort(); }
  return base[pe] + offset;
}
static float bf16(uint16_t bits) { union { uint32_t u; float f; } x = {.u = (uint32_t)bits << 16}; return x.f; }
static uint16_t to_bf16(float f) { union { float f; uint32_t u; } x = {.f = f}; return (uint16_t)((x.u + 0x7FFF + ((x.u >> 16) & 1)) >> 16); }
static void add(void *into, const void *from, size_t n, Type type) {
  for (size_t i = 0; i < n; i++) switch (type) {
    case FLOAT: ((float *)into)[i] += ((const float *)from)[i]; break;
    case DOUBLE: ((double *)into)[i] += ((const double *)from)[i]; break;
    case HALF: ((_Float16 *)into)[i] += ((const _Float16 *)from)[i]; break;
    case BFLOAT16: ((uint16_t *)into)[i] = to_bf16(bf16(((uint16_t *)into)[i]) + bf16(((const uint16_t *)from)[i]));
  }
}
static const size_t size_of[] = {4, 8, 2, 2};
/* All PEs of a team must name the same places; all have read before anyone writes. */
static void add_up(Op *o) {
  Team t = o->team ? teams[o->team] : (Team){0, 1, n_ranks};
  Control *c = &control[1 + o->team];
  int mine = (rank - t.start) / t.apart;
  c->src[mine] = (uint64_t)((const char *)o->from - base[rank]);
  c->dst[mine] = (uint64_t)((char *)o->to - base[rank]);
  __sync_synchronize();
  line_up_in(c, t.n);
  for (int k = 0; k < t.n; k++)
    if (c->src[k] != c->src[mine] || c->dst[k] != c->dst[mine]) { fprintf(stderr, "NVSHMEM double: PE %d: a reduction at unlike places\n", rank); abort(); }
  size_t bytes = o->n * size_of[o->type];
  char *sum = calloc(1, bytes + 1);
  for (int k = 0; k < t.n; k++) add(sum, at(o->from, t.start + k * t.apart) + (o->kind == SUM_SCATTER ? (size_t)mine * bytes : 0), o->n, o->type);
  line_up_in(c, t.n);
  memcpy(o->to, sum, bytes);
  free(sum);
}
static void run(void *given) {
  Op *o = given;
  if (o->kind == SUM || o->kind == SUM_SCATTER) { add_up(o); return; }
  if (o->kind == PUT) {
    static int n_puts;
    const char *text = getenv("FAKENVSHMEM_CORRUPT");
    char wanted[32];
    memcpy(o->to, o->from, o->n);
    snprintf(wanted, sizeof wanted, ",%d:%d,", rank, __sync_add_and_fetch(&n_puts, 1));
    if (text && strstr(text, wanted)) ((char *)o->to)[o->n / 2] ^= 0x10;
  }
  if (o->kind != WAIT) {
    __sync_synchronize();
    if (o->word && o->op == 9) *o->word = o->value; else if (o->word) __sync_add_and_fetch(o->word, o->value);
    return;
  }
  double until = now_s() + option("FAKENVSHMEM_TIMEOUT", 20);
  for (long looks = 0;; looks++) {
    uint64_t x = *o->word, v = o->value;
    int c = o->op;
    if ((c == 0 && x == v) || (c == 1 && x != v) || (c == 2 && x > v) || (c == 3 && x <= v) || (c == 4 && x < v) || (c == 5 && x >= v)) return;
    if (looks > 20) usleep(looks > 200 ? 500 : 50);
    if (now_s() > until) { fprintf(stderr, "NVSHMEM double: PE %d: no signal came (%llu, waited for %llu)\n", rank, (unsigned long long)x, (unsigned long long)v); abort(); }
  }
}
static void enqueue(Op op, void *stream) { Op *o = malloc(sizeof *o); *o = op; cuLaunchHostFunc(stream, run, o); } /* may be captured: never freed */

API int nvshmemx_get_uniqueid(UniqueId *id) { snprintf(id->text, 100, "/shardroute-nvshmem-%d-%lld", getpid(), (long long)(now_s() * 1e9)); return 0; }
API int nvshmemx_set_attr_uniqueid_args(int r, int n, const UniqueId *id, Attributes *a) { a->unique.id = (UniqueId *)id; a->unique.rank = r; a->unique.n_ranks = n; return 0; }
API int nvshmemx_hostlib_init_attr(unsigned flags, Attributes *a) {
  (void)flags;
  rank = a->unique.rank; n_ranks = a->unique.n_ranks;
  heap_bytes = (size_t)option("FAKENVSHMEM_HEAP", 16.0 * (1 << 30));
  int fd = shm_open(a->unique.id->text, O_CREAT | O_RDWR, 0600);
  if (fd < 0 || n_ranks > MAX_PES || ftruncate(fd, (off_t)(CONTROL_BYTES + (size_t)n_ranks * heap_bytes))) return 7;
  char *all = mmap(NULL, CONTROL_BYTES + (size_t)n_ranks * heap_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (all == MAP_FAILED) return 7;
  close(fd);
  control = (Control *)all;
  for (int i = 0; i < n_ranks; i++) base[i] = all + CONTROL_BYTES + (size_t)i * heap_bytes;
  line_up();
  if (!rank) shm_unlink(a->unique.id->text);
  ready = 1;
  return 0;
}
API int nvshmemx_init_status(void) { return ready ? 2 : 0; }
API void nvshmemx_hostlib_finalize(void) { line_up(); ready = 0; }
API int nvshmem_my_pe(void) { return rank; }
API int nvshmem_n_pes(void) { return n_ranks; }
API void nvshmem_info_get_version(int *a, int *b) { *a = 1; *b = 3; }
API void nvshmemx_vendor_get_version_info(int *a, int *b, int *c) { *a = 3; *b = 8; *c = 0; }
API void nvshmem_info_get_name(char *name) { strcpy(name, "NVSHMEM double"); }
API void *nvshmem_malloc(size_t n) {
  size_t offset = (used + 4095) / 4096 * 4096;
  if (offset + n > heap_bytes) return NULL;
  used = offset + n;
  line_up();
  return base[rank] + offset;
}
API void *nvshmem_calloc(size_t k, size_t n) { return nvshmem_malloc(k * n); } /* pages of a new file are zero, and never used twice */
API void nvshmem_free(void *p) { (void)p; line_up(); }
API void *nvshmem_ptr(const void *p, int pe) { int domain = (int)option("FAKENVSHMEM_DOMAIN", n_ranks); return pe / domain == rank / domain ? at(p, pe) : NULL; }
API void nvshmem_barrier_all(void) { line_up(); }
API void nvshmemx_putmem_signal_on_stream(void *to, const void *from, size_t n, uint64_t *word, uint64_t value, int op, int pe, void *stream) {
  enqueue((Op){.kind = PUT, .to = at(to, pe), .from = from, .n = n, .word = (uint64_t *)at(word, pe), .value = value, .op = op}, stream);
}
API void nvshmemx_putmem_on_stream(void *to, const void *from, size_t n, int pe, void *stream) { enqueue((Op){.kind = PUT, .to = at(to, pe), .from = from, .n = n}, stream); }
API void nvshmemx_signal_op_on_stream(uint64_t *word, uint64_t value, int op, int pe, void *stream) {
  enqueue((Op){.kind = SIGNAL, .word = (uint64_t *)at(word, pe), .value = value, .op = op}, stream);
}
API void nvshmemx_signal_wait_until_on_stream(uint64_t *word, int compare, uint64_t value, void *stream) {
  enqueue((Op){.kind = WAIT, .word = word, .value = value, .op = compare}, stream);
}
API void nvshmemx_quiet_on_stream(void *stream) { (void)stream; __sync_synchronize(); }
/* All PEs split alike, so teams have one number everywhere. */
API int nvshmem_team_split_strided(int parent, int start, int apart, int n, const void *config, long mask, int *out) {
  (void)config; (void)mask;
  if (parent || n_teams + 2 >= (int)(CONTROL_BYTES / sizeof(Control)) || n_teams >= MAX_TEAMS) return 7;
  teams[n_teams] = (Team){start, apart, n};
  *out = (rank - start) % apart == 0 && rank >= start && (rank - start) / apart < n ? n_teams : -1;
  n_teams++;
  line_up();
  return 0;
}
#define SUMS(name, ctype, code)                                                                                                     \
  API int nvshmemx_##name##_sum_reduce_on_stream(int team, ctype *to, const ctype *from, size_t n, void *stream) {                  \
    enqueue((Op){.kind = SUM, .to = to, .from = from, .n = n, .team = team, .type = code}, stream);                                 \
    return 0;                                                                                                                       \
  }                                                                                                                                 \
  API int nvshmemx_##name##_sum_reducescatter_on_stream(int team, ctype *to, const ctype *from, size_t n, void *stream) {           \
    enqueue((Op){.kind = SUM_SCATTER, .to = to, .from = from, .n = n, .team = team, .type = code}, stream);                         \
    return 0;                                                                                                                       \
  }
SUMS(float, float, FLOAT)
SUMS(double, double, DOUBLE)
SUMS(half, void, HALF)
SUMS(bfloat16, void, BFLOAT16)
