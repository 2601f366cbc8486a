//! The contract of controllers in the mode `sequence` (AI-701): the same tests as in the other mode, and what is true
//! of processes alone.
#![expect(clippy::duplicate_mod, reason = "one suite, run in each mode")]

#[path = "abi.rs"]
mod abi;
#[path = "constraints.rs"]
mod constraints;
#[path = "forks.rs"]
mod forks;
#[path = "hostile.rs"]
mod hostile;
#[path = "lifetimes.rs"]
mod lifetimes;
#[path = "limits.rs"]
mod limits;
#[path = "random.rs"]
mod random;
#[path = "random_modules.rs"]
mod random_modules;
#[path = "variables.rs"]
mod variables;

use super::*;

in_this_mode!();

fn new_host(config: HostConfig) -> Host {
    let command = template_command("host::tests::in_processes::the_template_of_tests");
    Host::in_processes(config, command).unwrap()
}

/// Not a test: `new_host` starts it, with a socket as standard input, as the template of its processes.
#[test]
fn the_template_of_tests() {
    if is_template() {
        process::serve_as_template_of_test(constraints::options_model()).unwrap();
        std::process::exit(0);
    }
}
