//! The contract of controllers in the mode `shared` (AI-701).

#[path = "abi.rs"]
mod abi;
#[path = "constraint_sources.rs"]
mod constraint_sources;
#[path = "constraints.rs"]
mod constraints;
#[path = "forks.rs"]
mod forks;
#[path = "hostile.rs"]
mod hostile;
#[path = "limits.rs"]
mod limits;
#[path = "long_texts.rs"]
mod long_texts;
#[path = "random.rs"]
mod random;
#[path = "random_modules.rs"]
mod random_modules;
#[path = "variables.rs"]
mod variables;

use super::*;

in_this_mode!();

fn new_host(config: HostConfig) -> Host {
    Host::new(config).unwrap()
}
