//! What a process of a controller gives back and takes again.

use std::sync::Mutex;

use sapwood_proto::steer::VariableWrite;

use super::*;
use crate::host::group::Versioned;
use crate::host::group::variables::WriteResult;

/// Grants charges up to a sum, and notes them.
#[derive(Debug)]
struct Granting(usize, Mutex<Vec<usize>>);

impl Home for Granting {
    fn charge(&self, bytes: usize) -> bool {
        let mut charged = self.1.lock().unwrap();
        let granted = charged.iter().sum::<usize>() + bytes <= self.0;
        if granted {
            charged.push(bytes);
        }
        granted
    }

    fn read(&self, _: &str) -> Option<Versioned> {
        None
    }

    fn write(&self, _: &VariableWrite) -> Result<WriteResult, Abort> {
        Ok(WriteResult::Conflict(None))
    }
}

/// A controller that makes and frees a mask in each step must not use up the memory of all.
#[test]
#[cfg(target_os = "linux")]
fn ai_741_a_process_takes_what_it_gave_back_before_it_asks_for_more() {
    let home = Arc::new(Granting(250, Mutex::default()));
    let budget = MemoryBudget::of_home(Arc::clone(&home) as _);
    for _ in 0..100 {
        assert!(budget.charge(100));
        budget.refund(100);
    }
    assert_eq!(*home.1.lock().unwrap(), [100]);
    assert!(budget.charge(160), "60 of them are new");
    assert!(!budget.charge(100), "more than there is");
    budget.refund(60);
    assert!(budget.charge(150), "what was refused took nothing");
    assert_eq!(*home.1.lock().unwrap(), [100, 60, 90]);
}
