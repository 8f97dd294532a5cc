// Block RAM of Xilinx' 7 series as far as Yosys makes use of it for memories with one port for writing and one for
// reading, after UG473: both at the same width, in READ_FIRST mode, without output registers. `postsynthesis.py` refuses
// others.

module RAMB36E1 #(
    parameter RAM_MODE = "TDP", WRITE_MODE_A = "WRITE_FIRST", WRITE_MODE_B = "WRITE_FIRST",
    parameter integer READ_WIDTH_A = 0, READ_WIDTH_B = 0, WRITE_WIDTH_A = 0, WRITE_WIDTH_B = 0, DOA_REG = 0, DOB_REG = 0
) (
    input CLKARDCLK, CLKBWRCLK, ENARDEN, ENBWREN, REGCEAREGCE, REGCEB,
    input RSTRAMARSTRAM, RSTRAMB, RSTREGARSTREG, RSTREGB,
    input [15:0] ADDRARDADDR, ADDRBWRADDR,
    input [31:0] DIADI, DIBDI, input [3:0] DIPADIP, DIPBDIP,
    input [3:0] WEA, input [7:0] WEBWE,
    output [31:0] DOADO, DOBDO, output [3:0] DOPADOP, DOPBDOP
);
    generate
        if (RAM_MODE == "SDP") begin : sdp  // port A reads 72 bits, port B writes them
            ramb #(.LANES(8), .BITS(9)) ram (
                .clk(CLKBWRCLK), .write(ENBWREN), .at(ADDRBWRADDR[14:6]), .we(WEBWE), .d({DIBDI, DIADI}),
                .p({DIPBDIP, DIPADIP}), .read(ENARDEN), .from(ADDRARDADDR[14:6]), .q({DOBDO, DOADO}),
                .qp({DOPBDOP, DOPADOP})
            );
        end else begin : tdp  // port A writes 36 bits, port B reads them
            ramb #(.LANES(4), .BITS(10)) ram (
                .clk(CLKARDCLK), .write(ENARDEN), .at(ADDRARDADDR[14:5]), .we(WEA), .d(DIADI), .p(DIPADIP),
                .read(ENBWREN), .from(ADDRBWRADDR[14:5]), .q(DOBDO), .qp(DOPBDOP)
            );
        end
    endgenerate
endmodule

module RAMB18E1 #(
    parameter RAM_MODE = "TDP", WRITE_MODE_A = "WRITE_FIRST", WRITE_MODE_B = "WRITE_FIRST",
    parameter integer READ_WIDTH_A = 0, READ_WIDTH_B = 0, WRITE_WIDTH_A = 0, WRITE_WIDTH_B = 0, DOA_REG = 0, DOB_REG = 0
) (
    input CLKARDCLK, CLKBWRCLK, ENARDEN, ENBWREN, REGCEAREGCE, REGCEB,
    input RSTRAMARSTRAM, RSTRAMB, RSTREGARSTREG, RSTREGB,
    input [13:0] ADDRARDADDR, ADDRBWRADDR,
    input [15:0] DIADI, DIBDI, input [1:0] DIPADIP, DIPBDIP,
    input [1:0] WEA, input [3:0] WEBWE,
    output [15:0] DOADO, DOBDO, output [1:0] DOPADOP, DOPBDOP
);
    generate
        if (RAM_MODE == "SDP") begin : sdp  // port A reads 36 bits, port B writes them
            ramb #(.LANES(4), .BITS(9)) ram (
                .clk(CLKBWRCLK), .write(ENBWREN), .at(ADDRBWRADDR[13:5]), .we(WEBWE), .d({DIBDI, DIADI}),
                .p({DIPBDIP, DIPADIP}), .read(ENARDEN), .from(ADDRARDADDR[13:5]), .q({DOBDO, DOADO}),
                .qp({DOPBDOP, DOPADOP})
            );
        end else begin : tdp  // port A writes 18 bits, port B reads them
            ramb #(.LANES(2), .BITS(10)) ram (
                .clk(CLKARDCLK), .write(ENARDEN), .at(ADDRARDADDR[13:4]), .we(WEA), .d(DIADI), .p(DIPADIP),
                .read(ENBWREN), .from(ADDRBWRADDR[13:4]), .q(DOBDO), .qp(DOPBDOP)
            );
        end
    endgenerate
endmodule

// Lanes of eight bits and a parity bit, each with its own enable. A read gives what was there before a write.
module ramb #(
    parameter integer LANES = 8, BITS = 9
) (
    input clk, write, read, input [BITS-1:0] at, from, input [LANES-1:0] we, p, input [8*LANES-1:0] d,
    output [8*LANES-1:0] q, output [LANES-1:0] qp
);
    generate
        for (genvar i = 0; i < LANES; i++) begin : lane
            reg [8:0] memory [0:(1<<BITS)-1];
            reg [8:0] out;
            assign {qp[i], q[8*i+:8]} = out;
            always @(posedge clk) begin
                if (read) out <= memory[from];
                if (write && we[i]) memory[at] <= {p[i], d[8*i+:8]};
            end
        end
    endgenerate
endmodule
