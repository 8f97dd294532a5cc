// The Verilated accelerator between a host (AXI4-Lite) and a memory (AXI4), behind a C interface for ctypes.
//
// Compiled with -DBUS_BYTES=<width of the data bus> -DPORTS=<read ports, 1 or 2>. One clock cycle: the memory model drives its side from its own
// registers, handshakes are sampled, then the clock edge comes. So no signal of the design is answered in the same cycle
// but by its own `ready` or `valid`, and the design has none that depends on memory's in the same cycle.
//
// Read data is taken from memory in the cycle in which its beat is offered, written data arrives in memory when its
// response is offered: the latest that AXI allows, so that a design that does not wait for them is found out.

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <vector>

#include "Vcelosia_top.h"
#include "verilated.h"

// Verilator writes the two underscores of `m_axi__rdata` as `___05F`.
#define M(name) m_axi___05F##name
#define M1(name) m_axi1___05F##name
#define S(name) s_axil___05F##name
#define T(unit, name) trace___05F##unit##___05F##name

namespace {

constexpr int UNITS = 4;
constexpr int WRITES = PORTS;  // number of the channel of writes, behind those of reads
constexpr uint64_t PAGE = 4096;
constexpr uint64_t MAX_BURST = 16;
constexpr unsigned OKAY = 0, SLVERR = 2, DECERR = 3;
constexpr uint64_t NEVER = ~uint64_t(0);
const char* const UNIT_NAMES[UNITS] = {"LOAD", "GEMM", "VECTOR", "STORE"};

struct Event {
    uint32_t unit, index;
    uint64_t start, end;
};

}  // namespace

extern "C" {

// Mirrored by `_Parameters` in rtlsim.py.
struct Parameters {
    uint64_t read_latency;      // cycles from the acceptance of a read's address to its first beat
    uint64_t write_latency;     // cycles from the last beat of a write to its response
    uint64_t outstanding;       // bursts that are accepted on each port, each way, before the first one has ended
    uint64_t refresh_period;    // every so many cycles ...
    uint64_t refresh_cycles;    // ... no beat moves for this long
    uint64_t bytes_per_cycle;   // of the memory, all ports and both ways together; 0: no limit
    uint64_t stall;             // probability, in 65536ths, that a channel pauses in a cycle
    uint64_t jitter;            // up to this many cycles are added to each latency
    uint64_t seed;
    uint64_t error_start;       // beats in [error_start, error_end) are answered with SLVERR or DECERR
    uint64_t error_end;
    uint64_t freeze_after;      // from this cycle of a run on memory does nothing ...
    uint64_t freeze_cycles;     // ... for so many cycles
};

struct Simulator;
}

namespace {

struct Burst {
    uint64_t addr;
    unsigned beats;
    uint64_t due;       // cycle of the first beat or of the response
    unsigned done = 0;  // beats that have passed
    bool error = false;
    uint8_t data[MAX_BURST * BUS_BYTES];
    uint8_t strobe[MAX_BURST * BUS_BYTES];
};

// What was offered on an address channel in the last cycle without being taken: AXI wants it held.
struct Held {
    bool held = false;
    uint64_t addr = 0;
    unsigned len = 0;
};

// A read port of the design: its signals, and what memory knows of it.
struct Reads {
    CData &arvalid, &arready, &arlen, &arsize, &arburst;
    QData& araddr;
    CData &rvalid, &rready, &rlast, &rresp;
    void* rdata;
    std::deque<Burst> bursts{};  // accepted
    Held held{};
    bool taken = false;  // a beat, in this cycle
};

#define READS(M)                                                                                            \
    {                                                                                                       \
        top.M(arvalid), top.M(arready), top.M(arlen), top.M(arsize), top.M(arburst), top.M(araddr),         \
            top.M(rvalid), top.M(rready), top.M(rlast), top.M(rresp), &top.M(rdata)                         \
    }

}  // namespace

struct Simulator {
    VerilatedContext context;
    Vcelosia_top top;
    Parameters p{};
    uint8_t* memory = nullptr;
    uint64_t memory_base = 0, memory_size = 0;

    uint64_t cycle = 0;  // of the run
    uint64_t random = 1;
    uint64_t credit = 0;
    int turn = 0;  // the channel whose turn it is where not all may move a beat
#if PORTS == 2
    Reads reads[PORTS] = {READS(M), READS(M1)};
#else
    Reads reads[PORTS] = {READS(M)};
#endif
    std::deque<Burst> writes;          // accepted; they stay until their response has been taken
    unsigned writes_filled = 0;        // writes that have all their data
    char error[256] = "";

    bool trace = false;
    std::vector<Event> events;
    std::deque<Event> open[UNITS];
    uint64_t started[UNITS] = {}, ended[UNITS] = {};
    int64_t last_started[UNITS], last_ended[UNITS];
    uint64_t states[1 << 2 * UNITS] = {};  // cycles in which the units were in these states, two bits each

    Held aw_held;
    bool w_held = false;
    uint8_t w_data[BUS_BYTES];

    // What is undefined is random: at the start all memories and registers without a reset, later what is read where it
    // is written.
    explicit Simulator(uint64_t seed) : top{seeded(context, seed)} { reset(); }

    static VerilatedContext* seeded(VerilatedContext& context, uint64_t seed) {
        context.randReset(2);
        context.randSeed(static_cast<int>(seed % 0x7fffffff) + 1);  // 0 would be another one each time
        return &context;
    }

    void fail(const char* format, ...) {
        if (error[0]) return;
        va_list arguments;
        va_start(arguments, format);
        std::vsnprintf(error, sizeof error, format, arguments);
        va_end(arguments);
    }

    void reset() {
        for (Reads& port : reads) {
            port.bursts.clear();
            port.held = {};
            port.arready = port.rvalid = port.rlast = 0;
            port.rresp = OKAY;
        }
        writes.clear();
        writes_filled = 0;
        aw_held = {};
        w_held = false;
        error[0] = 0;
        top.M(awready) = top.M(wready) = top.M(bvalid) = 0;
        top.M(bresp) = OKAY;
        top.S(awvalid) = top.S(wvalid) = top.S(bready) = 0;
        top.S(arvalid) = top.S(rready) = 0;
        top.rst = 1;
        for (int i = 0; i < 4; i++) clock();
        top.rst = 0;
        begin(false);
    }

    // Before a run: cycles, events and the random numbers start again. What memory owes of an earlier run is due.
    void begin(bool with_trace) {
        for (Reads& port : reads)
            for (Burst& burst : port.bursts) burst.due = 0;
        for (Burst& burst : writes) burst.due = 0;
        cycle = 0;
        credit = 0;
        turn = 0;
        random = p.seed * 2 + 1;
        trace = with_trace;
        events.clear();
        for (int unit = 0; unit < UNITS; unit++) {
            open[unit].clear();
            started[unit] = ended[unit] = 0;
            last_started[unit] = last_ended[unit] = -1;
        }
    }

    uint64_t draw() {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        return random;
    }

    bool pause() { return p.stall && (draw() >> 20 & 0xffff) < p.stall; }
    uint64_t extra() { return p.jitter ? (draw() >> 20) % (p.jitter + 1) : 0; }
    unsigned failure() { return draw() >> 20 & 1 ? SLVERR : DECERR; }
    bool faulty(uint64_t addr) {
        const uint64_t offset = addr - memory_base;
        return offset + BUS_BYTES > p.error_start && offset < p.error_end;
    }

    Burst accept(const char* what, uint64_t addr, unsigned len, unsigned size, unsigned burst) {
        const unsigned beats = len + 1;
        if (beats > MAX_BURST) fail("AXI %s: a burst of %u beats, more than AXI3 allows", what, beats);
        if (1u << size != BUS_BYTES || burst != 1) fail("AXI %s: not full-width beats of type INCR", what);
        if (addr % BUS_BYTES) fail("AXI %s: address 0x%llx is not aligned to the bus", what, (unsigned long long)addr);
        if (addr / PAGE != (addr + beats * BUS_BYTES - 1) / PAGE)
            fail("AXI %s: a burst crosses 4 KB at 0x%llx", what, (unsigned long long)addr);
        if (addr < memory_base || addr + beats * BUS_BYTES > memory_base + memory_size)
            fail("AXI %s: address 0x%llx lies outside memory", what, (unsigned long long)addr);
        Burst result;
        result.addr = addr;
        result.beats = beats;
        result.due = 0;
        return result;
    }

    void offer_read(Reads& port, uint64_t now) {
        if (port.rvalid || port.bursts.empty()) return;
        const Burst& burst = port.bursts.front();
        if (burst.due > now || pause()) return;
        const uint64_t addr = burst.addr + burst.done * BUS_BYTES;
        const bool bad = faulty(addr);
        if (bad)
            std::memset(port.rdata, 0, BUS_BYTES);
        else
            std::memcpy(port.rdata, memory + (addr - memory_base), BUS_BYTES);
        port.rresp = bad ? failure() : OKAY;
        port.rlast = burst.done + 1 == burst.beats;
        port.rvalid = 1;
        credit -= p.bytes_per_cycle ? BUS_BYTES : 0;
    }

    void offer_response(uint64_t now) {
        if (top.M(bvalid) || writes_filled == 0 || writes.front().due > now || pause()) return;
        const Burst& burst = writes.front();
        if (!burst.error)
            for (unsigned i = 0; i < burst.beats * BUS_BYTES; i++)
                if (burst.strobe[i]) memory[burst.addr - memory_base + i] = burst.data[i];
        top.M(bresp) = burst.error ? failure() : OKAY;
        top.M(bvalid) = 1;
    }

    // Whether a channel has a beat to move: of reads by the number of its port, of writes behind them.
    bool wants(int channel) {
        if (channel == WRITES) return top.M(wvalid);
        const auto& bursts = reads[channel].bursts;
        return !bursts.empty() && bursts.front().due <= cycle;
    }

    // The channels that may move a beat in this cycle, as a mask. Where the memory has not enough for all, they take
    // turns.
    unsigned allowed() {
        constexpr unsigned all = (2u << WRITES) - 1;
        if (!p.bytes_per_cycle) return all;
        const uint64_t most = 2 * (p.bytes_per_cycle > BUS_BYTES ? p.bytes_per_cycle : BUS_BYTES);
        credit = credit + p.bytes_per_cycle < most ? credit + p.bytes_per_cycle : most;
        const uint64_t beats = credit / BUS_BYTES;
        if (beats > WRITES) return all;
        unsigned mask = 0, count = 0;
        int last = 0;
        for (int i = 0; i <= WRITES && count < (beats ? beats : 1); i++) {
            const int channel = (turn + i) % (WRITES + 1);
            if (!wants(channel)) continue;
            mask |= 1u << channel;
            count++;
            last = channel;
        }
        if (beats) turn = (last + 1) % (WRITES + 1);  // without a beat, no turn is used up
        return beats ? mask : 0;
    }

    // The memory's side of this cycle.
    void drive() {
        const bool frozen = cycle >= p.freeze_after && cycle - p.freeze_after < p.freeze_cycles;
        const bool refresh = p.refresh_period && cycle % p.refresh_period < p.refresh_cycles;
        const unsigned mask = allowed(), may_move = frozen || refresh ? 0 : mask;
        for (int i = 0; i < PORTS; i++)
            if (may_move >> i & 1) offer_read(reads[i], cycle);
        if (!frozen) offer_response(cycle);
        for (Reads& port : reads) port.arready = !frozen && port.bursts.size() < p.outstanding && !pause();
        top.M(awready) = !frozen && writes.size() < p.outstanding && !pause();
        top.M(wready) = may_move >> WRITES && writes_filled < writes.size() && !pause();
    }

    // After the design has settled: what passes at the coming edge.
    void sample() {
        for (Reads& port : reads) {
            port.taken = port.rvalid && port.rready;
            if (port.taken && ++port.bursts.front().done == port.bursts.front().beats) port.bursts.pop_front();
        }
        if (top.M(bvalid) && top.M(bready)) {
            top_b_taken = true;
            writes.pop_front();
            writes_filled--;
        }
        if (top.M(wvalid)) {
            if (w_held && std::memcmp(w_data, &top.M(wdata), BUS_BYTES)) fail("AXI write: data changed while held");
            if (top.M(wready)) {
                Burst& burst = writes[writes_filled];
                uint64_t strobe[(BUS_BYTES + 63) / 64] = {};
                std::memcpy(strobe, &top.M(wstrb), (BUS_BYTES + 7) / 8);
                std::memcpy(burst.data + burst.done * BUS_BYTES, &top.M(wdata), BUS_BYTES);
                for (unsigned i = 0; i < BUS_BYTES; i++)
                    burst.strobe[burst.done * BUS_BYTES + i] = strobe[i / 64] >> (i % 64) & 1;
                burst.error = burst.error || faulty(burst.addr + burst.done * BUS_BYTES);
                burst.done++;
                credit -= p.bytes_per_cycle ? BUS_BYTES : 0;
                if (bool(top.M(wlast)) != (burst.done == burst.beats)) fail("AXI write: wlast at the wrong beat");
                if (burst.done == burst.beats) {
                    burst.due = cycle + p.write_latency + extra();
                    if (writes_filled && burst.due < writes[writes_filled - 1].due)
                        burst.due = writes[writes_filled - 1].due;
                    writes_filled++;
                }
            }
        } else if (w_held) {
            fail("AXI write: wvalid withdrawn");
        }
        w_held = top.M(wvalid) && !top.M(wready);
        if (w_held) std::memcpy(w_data, &top.M(wdata), BUS_BYTES);

        for (Reads& port : reads)
            address("read", port.arvalid, port.arready, port.araddr, port.arlen, port.arsize, port.arburst, port.held,
                    port.bursts, p.read_latency);
        address("write", top.M(awvalid), top.M(awready), top.M(awaddr), top.M(awlen), top.M(awsize), top.M(awburst),
                aw_held, writes, 0);
    }

    void address(const char* what, bool valid, bool ready, uint64_t addr, unsigned len, unsigned size, unsigned burst,
                 Held& before, std::deque<Burst>& queue, uint64_t latency) {
        if (before.held && (!valid || addr != before.addr || len != before.len))
            fail("AXI %s: address changed while held", what);
        before = {valid && !ready, addr, len};
        if (valid && ready) {
            Burst accepted = accept(what, addr, len, size, burst);
            if (error[0]) return;
            accepted.due = cycle + latency + extra();
            queue.push_back(accepted);
        }
    }

    bool top_b_taken = false;

    void note(unsigned unit, bool start, uint32_t start_index, bool done, uint32_t done_index) {
        if (start) {
            started[unit]++;
            last_started[unit] = start_index;
            if (trace) open[unit].push_back({unit, start_index, cycle, 0});
        }
        if (done) {
            ended[unit]++;
            last_ended[unit] = done_index;
            if (trace) {
                if (open[unit].empty() || open[unit].front().index != done_index) {
                    fail("trace: %s ends instruction %u out of order", UNIT_NAMES[unit], done_index);
                } else {
                    Event event = open[unit].front();
                    open[unit].pop_front();
                    event.end = cycle + 1;
                    events.push_back(event);
                }
            }
        }
    }

    // Registers are clocked by each change of `clk` (build.py), those of twice its rate also in the middle of a cycle.
    void clock() {
#ifdef TWO_CLOCKS
        top.fast_clk ^= 1;
        top.eval();
        top.fast_clk ^= 1;
#endif
        top.clk ^= 1;
        top.eval();
    }

    // First half of a cycle where inputs of the AXI4-Lite port have changed, on which outputs of it depend in the same
    // cycle.
    void settle() {
        drive();
        top.eval();
    }

    // A cycle in which they have not: outputs are what the registers said at the last edge (tests/formal).
    void step() {
        drive();
        edge();
    }

    // Second half: handshakes and the clock edge.
    void edge() {
        sample();
        note(0, top.T(load, start), top.T(load, start_index), top.T(load, done), top.T(load, done_index));
        note(1, top.T(gemm, start), top.T(gemm, start_index), top.T(gemm, done), top.T(gemm, done_index));
        note(2, top.T(vector, start), top.T(vector, start_index), top.T(vector, done), top.T(vector, done_index));
        note(3, top.T(store, start), top.T(store, start_index), top.T(store, done), top.T(store, done_index));
        states[top.T(load, state) | top.T(gemm, state) << 2 | top.T(vector, state) << 4 | top.T(store, state) << 6]++;
        clock();
        for (Reads& port : reads)
            if (port.taken) port.rvalid = 0;
        if (top_b_taken) top.M(bvalid) = 0;
        top_b_taken = false;
        cycle++;
    }
};

#pragma GCC visibility push(default)
extern "C" {

Simulator* celosia_create(uint64_t seed) { return new Simulator(seed); }

void celosia_destroy(Simulator* simulator) {
    simulator->top.final();
    delete simulator;
}

// Bytes [base, base + size) of the address space are `memory`, which the caller keeps alive.
void celosia_memory(Simulator* simulator, uint8_t* memory, uint64_t base, uint64_t size, const Parameters* parameters) {
    simulator->memory = memory;
    simulator->memory_base = base;
    simulator->memory_size = size;
    simulator->p = *parameters;
}

void celosia_reset(Simulator* simulator) { simulator->reset(); }

void celosia_begin(Simulator* simulator, int trace) { simulator->begin(trace); }

// Write a register through AXI4-Lite. 0 where the design does not answer within 1000 cycles.
int celosia_write_register(Simulator* simulator, uint32_t offset, uint32_t value) {
    auto& top = simulator->top;
    top.S(awaddr) = offset;
    top.S(wdata) = value;
    top.S(wstrb) = 15;
    top.S(awvalid) = top.S(wvalid) = top.S(bready) = 1;
    bool answered = false;
    for (int i = 0; i < 1000 && !answered; i++) {
        simulator->settle();
        const bool address = top.S(awvalid) && top.S(awready);
        const bool data = top.S(wvalid) && top.S(wready);
        answered = top.S(bvalid);
        simulator->edge();
        if (address) top.S(awvalid) = 0;
        if (data) top.S(wvalid) = 0;
    }
    top.S(awvalid) = top.S(wvalid) = top.S(bready) = 0;
    return answered;
}

// Read a register. 0 where the design does not answer within 1000 cycles.
int celosia_read_register(Simulator* simulator, uint32_t offset, uint32_t* value) {
    auto& top = simulator->top;
    top.S(araddr) = offset;
    top.S(arvalid) = top.S(rready) = 1;
    bool answered = false;
    for (int i = 0; i < 1000 && !answered; i++) {
        simulator->settle();
        const bool address = top.S(arvalid) && top.S(arready);
        answered = top.S(rvalid);
        if (answered) *value = top.S(rdata);
        simulator->edge();
        if (address) top.S(arvalid) = 0;
    }
    top.S(arvalid) = top.S(rready) = 0;
    return answered;
}

// Run until the interrupt (1), `cycles` have passed (0), or memory saw something illegal (-1).
int celosia_run(Simulator* simulator, uint64_t cycles) {
    for (uint64_t i = 0; i < cycles; i++) {
        if (simulator->top.irq) return 1;
        simulator->step();
        if (simulator->error[0]) return -1;
    }
    return simulator->top.irq;
}

const char* celosia_error(Simulator* simulator) { return simulator->error; }
uint64_t celosia_cycle(Simulator* simulator) { return simulator->cycle; }

// Events of the run: (unit, index, start, end).
uint64_t celosia_event_count(Simulator* simulator) { return simulator->events.size(); }
const void* celosia_events(Simulator* simulator) { return simulator->events.data(); }

// Since the simulator was made: cycles in each combination of the units' states (`State` of hw/top.py), two bits for
// each unit, the first one's lowest.
const uint64_t* celosia_states(Simulator* simulator) { return simulator->states; }

// For each unit: instructions started, ended, number of the last one started and of the last one ended (-1: none).
void celosia_progress(Simulator* simulator, int64_t* out) {
    for (int unit = 0; unit < UNITS; unit++) {
        *out++ = simulator->started[unit];
        *out++ = simulator->ended[unit];
        *out++ = simulator->last_started[unit];
        *out++ = simulator->last_ended[unit];
    }
}
}
#pragma GCC visibility pop
