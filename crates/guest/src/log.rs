//! Text for those who watch a controller.

use core::fmt::Arguments;

/// Prints a line to the controller's log, with the syntax of `format!`. What a step prints is sent with the step's result;
/// a host keeps at most 64 KiB of a step.
#[macro_export]
macro_rules! log {
    ($($argument:tt)*) => {
        $crate::write_line(::core::format_args!($($argument)*))
    };
}

/// Prints a line to the controller's log: what [`log!`](crate::log!) does.
pub fn write_line(line: Arguments<'_>) {
    let mut text = alloc::fmt::format(line);
    text.push('\n');
    crate::host::log(&text);
}
