//! The contract of controllers in the mode `shared` (AI-701).

#[path = "abi.rs"]
mod abi;
#[path = "forks.rs"]
mod forks;
#[path = "hostile.rs"]
mod hostile;
#[path = "limits.rs"]
mod limits;
#[path = "variables.rs"]
mod variables;

use super::*;

in_this_mode!();

fn new_host(config: HostConfig) -> Host {
    Host::new(config).unwrap()
}
