//! Rewrites programs of minijinja instruction by instruction; jumps keep their targets.

use minijinja::Error;
use minijinja::machinery::Instruction;

/// Puts what `each` appends in place of each instruction. Jumps to an instruction go to the first of those, or to what follows if there are
/// none.
///
/// # Errors
/// That of `each`.
pub(super) fn replaced<'a>(
    from: Vec<Instruction<'a>>,
    mut each: impl FnMut(usize, Instruction<'a>, &mut Vec<Instruction<'a>>) -> Result<(), Error>,
) -> Result<Vec<Instruction<'a>>, Error> {
    let mut to = Vec::with_capacity(from.len());
    let mut positions = Vec::with_capacity(from.len());
    for (at, instruction) in from.into_iter().enumerate() {
        positions.push(to.len() as u32);
        each(at, instruction, &mut to)?;
    }
    let end = to.len() as u32;
    for instruction in &mut to {
        // After all are replaced, because jumps may go forwards.
        if let Instruction::Jump(target)
        | Instruction::JumpIfFalse(target)
        | Instruction::JumpIfFalseOrPop(target)
        | Instruction::JumpIfTrueOrPop(target)
        | Instruction::Iterate(target)
        | Instruction::BuildMacro(_, target, _) = instruction
        {
            *target = positions.get(*target as usize).copied().unwrap_or(end);
        }
    }
    Ok(to)
}
