// A DSP48E2 as UG579 describes it, for tests: Yosys has only its ports. Not written from hw/gemm_core/dsp48.py. What is not
// here, resets, SIMD, patterns and carries between blocks, ends the simulation where it is asked for.
module DSP48E2 #(
    parameter integer ACASCREG = 1, ADREG = 1, ALUMODEREG = 1, AREG = 1, BCASCREG = 1, BREG = 1, CARRYINREG = 1,
    CARRYINSELREG = 1, CREG = 1, DREG = 1, INMODEREG = 1, MREG = 1, OPMODEREG = 1, PREG = 1,
    parameter [47:0] RND = 0, parameter AMULTSEL = "A", BMULTSEL = "B", PREADDINSEL = "A"
) (
    input CLK, input signed [29:0] A, input signed [17:0] B, input [47:0] C, input [26:0] D, input [29:0] ACIN,
    input [17:0] BCIN, input [47:0] PCIN, input CARRYCASCIN, MULTSIGNIN, CARRYIN, input [2:0] CARRYINSEL,
    input [4:0] INMODE, input [3:0] ALUMODE, input [8:0] OPMODE,
    input CEA1, CEA2, CEAD, CEALUMODE, CEB1, CEB2, CEC, CECARRYIN, CECTRL, CED, CEINMODE, CEM, CEP,
    input RSTA, RSTALLCARRYIN, RSTALUMODE, RSTB, RSTC, RSTCTRL, RSTD, RSTINMODE, RSTM, RSTP,
    output [47:0] P, PCOUT
);
    // Table 2-1 and figure 2-2: of one register it is the second one that is there, with its own enable.
    reg signed [29:0] a1, a2;
    reg signed [17:0] b1, b2;
    reg signed [26:0] d, ad;
    reg signed [44:0] m;
    reg [47:0] c, p;
    reg [4:0] inmode = 0;
    reg [8:0] opmode = 0;
    wire [4:0] chosen = INMODEREG == 0 ? INMODE : inmode;
    wire [8:0] operation = OPMODEREG == 0 ? OPMODE : opmode;

    // Table 2-2 and figure 2-4, the pre-adder with A: bit 0 takes the first register, 1 leaves A out, 2 takes D.
    wire signed [26:0] own = AREG == 0 ? A[26:0] : a2[26:0];
    wire signed [26:0] added = chosen[1] ? 27'sd0 : own;
    wire signed [26:0] fourth = !chosen[2] ? 27'sd0 : DREG == 0 ? D : d;
    wire signed [26:0] pre = fourth + added;
    wire signed [26:0] left = AMULTSEL == "A" ? added : ADREG == 0 ? pre : ad;
    wire signed [17:0] right = BREG == 0 ? B : b2;
    wire signed [44:0] product = left * right;
    wire signed [44:0] multiplied = MREG == 0 ? product : m;
    wire [47:0] third = CREG == 0 ? C : c;

    // Tables 2-3 to 2-6: OPMODE. X and Y together are the product where both are 01.
    reg [47:0] w, x_y, z;
    always @* begin
        case (operation[8:7])
            2'b00: w = 0;
            2'b01: w = p;
            2'b10: w = RND;
            2'b11: w = third;
        endcase
        case (operation[3:0])
            4'b0000: x_y = 0;
            4'b0101: x_y = {{3{multiplied[44]}}, multiplied};
            4'b1100: x_y = third;
            default: $fatal(1, "OPMODE");
        endcase
        case (operation[6:4])
            3'b000: z = 0;
            3'b001: z = PCIN;
            3'b010: z = p;
            3'b011: z = third;
            3'b101: z = {{17{PCIN[47]}}, PCIN[47:17]};
            3'b110: z = {{17{p[47]}}, p[47:17]};
            default: $fatal(1, "OPMODE");
        endcase
    end

    // Table 2-7: ALUMODE.
    reg [47:0] sum;
    always @*
        case (ALUMODE)
            4'b0000: sum = z + (w + x_y + CARRYIN);
            4'b0001: sum = -z + (w + x_y + CARRYIN) - 1;
            4'b0010: sum = -z - (w + x_y + CARRYIN) - 1;
            4'b0011: sum = z - (w + x_y + CARRYIN);
            default: $fatal(1, "ALUMODE");
        endcase

    always @(posedge CLK) begin
        if (CEA1) a1 <= A;
        if (CEA2) a2 <= AREG == 2 ? a1 : A;
        if (CEB1) b1 <= B;
        if (CEB2) b2 <= BREG == 2 ? b1 : B;
        if (CEC) c <= C;
        if (CED) d <= D;
        if (CEAD) ad <= pre;
        if (CEINMODE) inmode <= INMODE;
        if (CECTRL) opmode <= OPMODE;
        if (CEM) m <= product;
        if (CEP) p <= sum;
        if (ALUMODEREG | CARRYINREG | CARRYINSELREG) $fatal(1, "registers of controls");
        if (INMODE[0] | INMODE[3] | INMODE[4] || CARRYINSEL != 0) $fatal(1, "INMODE, CARRYINSEL");
        if ((AMULTSEL != "A" && AMULTSEL != "AD") || BMULTSEL != "B" || PREADDINSEL != "A") $fatal(1, "pre-adder");
        if (RSTA | RSTALLCARRYIN | RSTALUMODE | RSTB | RSTC | RSTCTRL | RSTD | RSTINMODE | RSTM | RSTP)
            $fatal(1, "resets");
    end
    assign P = PREG == 0 ? sum : p, PCOUT = P;
endmodule
