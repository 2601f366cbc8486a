//! The exports of a module: JSON in, a controller's decision, JSON out.
//!
//! Only [`export!`](crate::export!) uses it. Both forms are compiled everywhere, so that tests of the host see them.

pub mod p1;
pub mod p2;

#[cfg(target_arch = "wasm32")]
pub use crate::wasm::{Exported, start};

use alloc::string::String;
use alloc::vec::Vec;

use crate::json::{Reader, push_string};
use crate::{Controller, SequenceId, Token};

/// Exports a controller: the type implements [`Controller`]. Once for each module; on other targets than WebAssembly it
/// exports nothing.
#[macro_export]
macro_rules! export {
    ($controller:ty) => {
        $crate::__export_callbacks!($controller);
        const _: fn() = $crate::abi::assert_controller::<$controller>;
    };
}

/// The exports that both forms have, and those that are only here.
#[doc(hidden)]
#[macro_export]
macro_rules! __export {
    ($machine:ty, $($name:ident: $method:ident),*) => {
        #[cfg(target_arch = "wasm32")]
        const _: () = {
            static CONTROLLER: $crate::abi::Exported<$machine> = $crate::abi::Exported::new();

            #[unsafe(no_mangle)]
            extern "C" fn aici_init() {
                $crate::abi::start();
            }

            #[unsafe(no_mangle)]
            extern "C" fn aici_create() -> i32 {
                CONTROLLER.create(<$machine>::new);
                1
            }

            $(
                #[unsafe(no_mangle)]
                extern "C" fn $name(_handle: i32) {
                    CONTROLLER.call(<$machine>::$method);
                }
            )*
        };
    };
}

#[cfg(not(feature = "p1"))]
#[doc(hidden)]
#[macro_export]
macro_rules! __export_callbacks {
    ($controller:ty) => {
        $crate::__export!($crate::abi::p2::BranchMachine<$controller>,
            aici_init_prompt: init_prompt, aici_mid_process: mid_process);
    };
}

#[cfg(feature = "p1")]
#[doc(hidden)]
#[macro_export]
macro_rules! __export_callbacks {
    ($controller:ty) => {
        $crate::__export!($crate::abi::p1::StepMachine<$controller>,
            aici_init_prompt: init_prompt, aici_pre_process: pre_process,
            aici_mid_process: mid_process, aici_post_process: post_process);
    };
}

/// Compiles if the type is a controller, and uses it on targets that export nothing.
pub fn assert_controller<C: Controller>() {
    let _ = C::step;
    let _ = C::default;
}

/// The argument of a callback. Members that a callback does not have are empty.
#[derive(Default)]
struct Argument {
    prompt: Vec<Token>,
    backtrack: u32,
    tokens: Vec<Token>,
    sampled: Option<Token>,
    fork_group: Vec<SequenceId>,
}

impl Argument {
    /// Reads it. The host writes it, so there is nobody to whom an error could be explained.
    fn of(json: &[u8]) -> Self {
        let mut argument = Self::default();
        let read = Reader::new(json).members(&mut |reader, name| {
            match name {
                "prompt" => argument.prompt = reader.numbers()?,
                "backtrack" => argument.backtrack = reader.number()?,
                "tokens" => argument.tokens = reader.numbers()?,
                "sampled" => {
                    argument.sampled = if reader.null() {
                        None
                    } else {
                        Some(reader.number()?)
                    }
                }
                "fork_group" => argument.fork_group = reader.numbers()?,
                _ => reader.skip()?,
            }
            Ok(())
        });
        if let Err(error) = read {
            panic!("the host's argument of a callback: {error}");
        }
        argument
    }

    /// The fork group, or this sequence alone.
    fn group(self) -> Vec<SequenceId> {
        if self.fork_group.is_empty() {
            alloc::vec![crate::self_id()]
        } else {
            self.fork_group
        }
    }
}

/// The member of a result with the variables for which the sequence waits.
fn push_wait(json: &mut String, names: &[String]) {
    json.push_str(",\"wait\":[");
    for (index, name) in names.iter().enumerate() {
        if index > 0 {
            json.push(',');
        }
        push_string(json, name);
    }
    json.push(']');
}

#[cfg(test)]
mod tests;
