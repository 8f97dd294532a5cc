# Makes NAME.bit, NAME.hwh and NAME.json beside this file:   vivado -mode batch -source build.tcl
#
# The block design: processors, the accelerator as a module, a controller for its interrupt, an interconnect to the registers
# of both, one from each memory port, where that is not of the processors' own kind; and what makes two clocks of one, where
# the array has its own.

set here [file normalize [file dirname [info script]]]
source [file join $here settings.tcl]

# Full name of the newest version of an IP that this Vivado has.
proc newest {ip} {
    set found [lsort -dictionary [get_ipdefs -quiet -filter "VLNV =~ xilinx.com:ip:$ip:*"]]
    if {![llength $found]} {
        error "this Vivado has no IP $ip; install the device family of the board with it"
    }
    return [lindex $found end]
}

proc cell {ip name args} {
    set cell [create_bd_cell -type ip -vlnv [newest $ip] $name]
    if {[llength $args]} {
        set_property -dict $args $cell
    }
    return $cell
}

# Joins pins that carry one signal.
proc net {args} {
    connect_bd_net {*}[lmap pin $args {get_bd_pins $pin}]
}

proc bus {from to} {
    connect_bd_intf_net [get_bd_intf_pins $from] [get_bd_intf_pins $to]
}

# Whether Vivado knows the board, so that it can set the memory and the pins of the processors, too. PYNQ's boot image
# has done so already, and `celosia flash` sets the clock: without the board's files the bitstream is as good. They may
# name another speed grade, so this comes before any design, which would be for the old one.
proc use_board {files} {
    set parts [lsort -dictionary [get_board_parts -quiet "*:$files:*"]]
    if {![llength $parts]} {
        return 0
    }
    set_property board_part [lindex $parts end] [current_project]
    return 1
}

# Each makes the processors and returns names: clock, reset, control port and its clock, interrupt, and a list for each
# memory port: its name and its clock.
#
# The memory ports of a Zynq-7000 keep the 64 bits of their reset: other widths are set by the boot image, not by PYNQ.
proc processors_zynq {preset} {
    global clock_mhz ports
    cell processing_system7 ps
    apply_bd_automation -rule xilinx.com:bd_rule:processing_system7 \
        -config [list make_external "FIXED_IO, DDR" apply_board_preset $preset Master Disable Slave Disable] \
        [get_bd_cells ps]
    set_property -dict [list \
        CONFIG.PCW_EN_CLK0_PORT 1 CONFIG.PCW_EN_RST0_PORT 1 CONFIG.PCW_FPGA0_PERIPHERAL_FREQMHZ $clock_mhz \
        CONFIG.PCW_USE_M_AXI_GP0 1 CONFIG.PCW_USE_FABRIC_INTERRUPT 1 CONFIG.PCW_IRQ_F2P_INTR 1] [get_bd_cells ps]
    foreach n $ports {
        set_property -dict [list CONFIG.PCW_USE_S_AXI_HP$n 1 CONFIG.PCW_S_AXI_HP${n}_DATA_WIDTH 64] [get_bd_cells ps]
    }
    return [list ps/FCLK_CLK0 ps/FCLK_RESET0_N ps/M_AXI_GP0 ps/M_AXI_GP0_ACLK ps/IRQ_F2P \
        {*}[lmap n $ports {list ps/S_AXI_HP$n ps/S_AXI_HP${n}_ACLK}]]
}

proc processors_zynqmp {preset} {
    global clock_mhz bus_bits ports
    cell zynq_ultra_ps_e ps
    apply_bd_automation -rule xilinx.com:bd_rule:zynq_ultra_ps_e -config [list apply_board_preset $preset] \
        [get_bd_cells ps]
    set_property -dict [list \
        CONFIG.PSU__FPGA_PL0_ENABLE 1 CONFIG.PSU__CRL_APB__PL0_REF_CTRL__FREQMHZ $clock_mhz \
        CONFIG.PSU__USE__M_AXI_GP0 1 CONFIG.PSU__USE__M_AXI_GP1 0 CONFIG.PSU__USE__M_AXI_GP2 0 \
        CONFIG.PSU__USE__IRQ0 1] [get_bd_cells ps]
    foreach n $ports {
        set gp [expr {$n + 2}]
        set_property -dict [list CONFIG.PSU__USE__S_AXI_GP$gp 1 CONFIG.PSU__SAXIGP${gp}__DATA_WIDTH $bus_bits] \
            [get_bd_cells ps]
    }
    return [list ps/pl_clk0 ps/pl_resetn0 ps/M_AXI_HPM0_FPD ps/maxihpm0_fpd_aclk ps/pl_ps_irq0 \
        {*}[lmap n $ports {list ps/S_AXI_HP${n}_FPD ps/saxihp${n}_fpd_aclk}]]
}

# The accelerator's clock and one of twice the rate, aligned, from the processors' clock: `multiple` times that clock,
# divided by as much and by half of it. Both come from one MMCM, so that Vivado times all paths between them.
proc two_clocks {clock} {
    global clock_mhz multiple
    cell clk_wiz clocks CONFIG.PRIM_IN_FREQ $clock_mhz CONFIG.PRIM_SOURCE Global_buffer \
        CONFIG.USE_RESET true CONFIG.RESET_TYPE ACTIVE_LOW CONFIG.USE_LOCKED true CONFIG.CLKOUT2_USED true \
        CONFIG.CLKOUT1_REQUESTED_OUT_FREQ $clock_mhz CONFIG.CLKOUT2_REQUESTED_OUT_FREQ [expr {2 * $clock_mhz}] \
        CONFIG.OVERRIDE_MMCM true CONFIG.MMCM_DIVCLK_DIVIDE 1 CONFIG.MMCM_CLKFBOUT_MULT_F $multiple \
        CONFIG.MMCM_CLKOUT0_DIVIDE_F $multiple CONFIG.MMCM_CLKOUT1_DIVIDE [expr {$multiple / 2}]
    net $clock clocks/clk_in1
    net clocks/clk_out2 celosia/fast_clk
    net clocks/locked reset/dcm_locked
    return clocks/clk_out1
}

proc design {} {
    global board_files processor address lights ports direct multiple
    set preset [use_board $board_files]
    create_bd_design system
    set memories [lassign [processors_$processor $preset] clock resetn control control_clock interrupt]

    create_bd_cell -type module -reference celosia celosia
    cell proc_sys_reset reset
    cell axi_intc interrupts CONFIG.C_IRQ_CONNECTION 1
    cell smartconnect to_registers CONFIG.NUM_SI 1 CONFIG.NUM_MI 2
    bus $control to_registers/S00_AXI
    bus to_registers/M00_AXI celosia/s_axil
    bus to_registers/M01_AXI interrupts/s_axi
    set clocked [list $control_clock celosia/clk reset/slowest_sync_clk to_registers/aclk interrupts/s_axi_aclk]
    set cleared [list celosia/resetn to_registers/aresetn interrupts/s_axi_aresetn]
    foreach n $ports memory $memories {
        if {$direct} {
            bus celosia/[lindex {m_axi m_axi1} $n] [lindex $memory 0]
            lappend clocked [lindex $memory 1]
            continue
        }
        cell smartconnect to_memory$n CONFIG.NUM_SI 1 CONFIG.NUM_MI 1
        bus celosia/[lindex {m_axi m_axi1} $n] to_memory$n/S00_AXI
        bus to_memory$n/M00_AXI [lindex $memory 0]
        lappend clocked [lindex $memory 1] to_memory$n/aclk
        lappend cleared to_memory$n/aresetn
    }
    set reset_by [list reset/ext_reset_in]
    if {$multiple} {
        set clock [two_clocks $clock]
        lappend reset_by clocks/resetn
    }
    net $clock {*}$clocked
    net $resetn {*}$reset_by
    net reset/peripheral_aresetn {*}$cleared
    net celosia/irq interrupts/intr
    net interrupts/irq $interrupt
    foreach state $lights {
        create_bd_port -dir O led_$state
        connect_bd_net [get_bd_pins celosia/$state] [get_bd_ports led_$state]
    }

    assign_bd_address
    foreach {block offset range} [list celosia $address 4K interrupts [format 0x%08x [expr {$address + 0x10000}]] 64K] {
        set registers [get_bd_addr_segs ps/*/SEG_${block}_*]
        set_property offset $offset $registers
        set_property range $range $registers
    }
    validate_bd_design
    save_bd_design
    add_files -norecurse [make_wrapper -files [get_files system.bd] -top]
    set_property top system_wrapper [current_fileset]
}

# Runs to the end; the error names the log with the reason, which may be that of an IP's run before it.
proc finish {name args} {
    launch_runs $name {*}$args
    catch {wait_on_run $name}
    set run [get_runs $name]
    if {[get_property PROGRESS $run] ne "100%"} {
        set run [lindex [concat [get_runs -quiet -filter {STATUS =~ "*ERROR*"}] $run] 0]
        error "Vivado's $run ended with: [get_property STATUS $run]; see [get_property DIRECTORY $run]/runme.log"
    }
    return $run
}

proc implement {jobs} {
    finish synth_1 -jobs $jobs
    set run [finish impl_1 -to_step write_bitstream -jobs $jobs]
    foreach {property what} {STATS.WNS "setup times; make the project with a smaller --clock" STATS.WHS "hold times"} {
        set slack [get_property $property $run]
        if {$slack < 0} {
            error "the timing is missed by [expr {-$slack}] ns in $what"
        }
    }
    return $run
}

proc sha256 {path} {
    if {![catch {package require sha256}]} {
        return [::sha2::sha256 -hex -file $path]
    }
    return [lindex [exec sha256sum $path] 0]
}

proc only {pattern what} {
    set found [glob -nocomplain {*}$pattern]
    if {[llength $found] != 1} {
        error "expected one $what at $pattern, found [llength $found]"
    }
    return [lindex $found 0]
}

# The results go to their places at the end, so that an old bitstream is never mistaken for one of this run.
proc collect {run} {
    global here name
    foreach ending {bit hwh json} {
        file delete [file join $here $name.$ending]
    }
    set bit [file join [get_property DIRECTORY $run] system_wrapper.bit]
    set work [file join $here vivado]
    set hwh [only [list $work/celosia.{gen,srcs}/sources_1/bd/system/hw_handoff/system.hwh] "hardware handoff"]
    file copy -force $bit [file join $here $name.bit]
    file copy -force $hwh [file join $here $name.hwh]
    set in [open [file join $here manifest.in.json]]
    set manifest [string map [list @TOOL@ [version -short] @SLACK@ [get_property STATS.WNS $run] \
        @BIT@ [sha256 [file join $here $name.bit]] @HWH@ [sha256 [file join $here $name.hwh]]] [read $in]]
    close $in
    set out [open [file join $here $name.json] w]
    puts -nonewline $out $manifest
    close $out
    puts "celosia: wrote $name.bit, $name.hwh and $name.json"
}

create_project -force celosia [file join $here vivado] -part $part
add_files -norecurse [list [file join $here celosia.v] [file join $here celosia_top.v]]
add_files -fileset constrs_1 -norecurse [file join $here celosia.xdc]
update_compile_order -fileset sources_1
design
collect [implement 4]
