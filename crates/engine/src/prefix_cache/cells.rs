//! [`KvCells`]: counts which slots hold each KV cell.

/// The KV cells of a model, of which each is free or holds one token of one or more slots.
///
/// A cell is *pinned* while a live slot holds it; every other cell is free or can be freed by evicting cached slots.
#[derive(Debug)]
pub(crate) struct KvCells {
    cells: Vec<Cell>,
    free: Vec<u32>,
    pinned: usize,
}

#[derive(Clone, Copy, Debug, Default)]
struct Cell {
    /// Number of slots that hold it.
    holders: u32,
    /// Number of live slots that hold it.
    pins: u32,
}

impl KvCells {
    pub(super) fn new(cells: u32) -> Self {
        Self {
            cells: vec![Cell::default(); cells as usize],
            // Reversed, so that `pop` hands out the lowest cells first.
            free: (0..cells).rev().collect(),
            pinned: 0,
        }
    }

    /// Returns the number of cells that are free or can be freed by evicting: what a step may use.
    pub(crate) fn room(&self) -> usize {
        self.cells.len() - self.pinned
    }

    /// Returns the number of cells that only cached prefixes hold.
    pub(crate) fn idle(&self) -> usize {
        self.room() - self.free.len()
    }

    /// Returns the number of cells in use.
    pub(crate) fn used(&self) -> usize {
        self.cells.len() - self.free.len()
    }

    /// Returns the number of cells that nothing holds.
    pub(crate) fn free(&self) -> usize {
        self.free.len()
    }

    /// Returns whether a live slot holds a cell.
    pub(super) fn is_pinned(&self, cell: u32) -> bool {
        self.cells[cell as usize].pins > 0
    }

    /// Takes a free cell for a live slot.
    #[inline]
    pub(super) fn take(&mut self) -> Option<u32> {
        let cell = self.free.pop()?;
        self.cells[cell as usize] = Cell {
            holders: 1,
            pins: 1,
        };
        self.pinned += 1;
        Some(cell)
    }

    /// Adds a live slot to those that hold a cell.
    pub(super) fn share(&mut self, cell: u32) {
        // Both counts: the new slot holds the cell, and being live it also pins it.
        let cell = &mut self.cells[cell as usize];
        cell.holders += 1;
        cell.pins += 1;
        if cell.pins == 1 {
            self.pinned += 1;
        }
    }

    /// Notes that a slot which holds a cell is live no longer.
    pub(super) fn unpin(&mut self, cell: u32) {
        let pins = &mut self.cells[cell as usize].pins;
        *pins -= 1;
        if *pins == 0 {
            self.pinned -= 1;
        }
    }

    /// Removes a slot that does not pin a cell from those that hold it, and frees the cell after the last one.
    pub(super) fn release(&mut self, cell: u32) {
        let holders = &mut self.cells[cell as usize].holders;
        *holders -= 1;
        if *holders == 0 {
            self.free.push(cell);
        }
    }

    /// Checks that each cell has so many holders, and that the free ones have none.
    #[cfg(test)]
    pub(super) fn assert_held(&self, holders: &[u32]) {
        let counted: Vec<u32> = self.cells.iter().map(|cell| cell.holders).collect();
        assert_eq!(counted, holders);
        for &cell in &self.free {
            assert_eq!(holders[cell as usize], 0, "{cell} is free and held");
        }
    }
}
