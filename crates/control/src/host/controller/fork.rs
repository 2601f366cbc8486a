//! The copy of an instance (AI-711), by the steps that [`module`](crate::module) describes. No guest code runs.

use std::collections::HashMap;

use sapwood_proto::error_reason::ErrorReason;
use wasmtime::{Func, Ref, Store, Table, Val};

use super::pages;
use super::{Broken, Controller, Ended, Exports, Parts, call, find_memory, new_store};
use crate::host::failure::CallFailure;
use crate::host::random::SeededRandom;
use crate::host::state::ControllerState;

impl Controller {
    /// A new instance in the same state. `state`: of the child; it gets the parent's blobs and clock.
    pub(in crate::host) fn fork(
        &mut self,
        mut state: ControllerState,
    ) -> Result<Box<Self>, CallFailure> {
        let parent = self.store.data_mut();
        // Charged first: what is over the limit is not copied at all.
        let charged = state
            .limiter
            .hold(parent.handles.bytes() + parent.blobs.bytes());
        charged.map_err(|abort| CallFailure::new(abort.reason, abort.message))?;
        let handles = parent.handles.fork();
        state.handles =
            handles.map_err(|failure| CallFailure::new(failure.reason, failure.message))?;
        state.blobs = parent.blobs.clone();
        state.random = parent.random.as_mut().map(SeededRandom::fork);
        state.instantiated = parent.instantiated;
        let mut store = new_store(&self.program, state);
        match self.copy_into(&mut store) {
            Ok(parts) => Ok(Box::new(parts.into_controller(store, &self.program))),
            Err(Broken::Result(failure)) => Err(failure),
            Err(Broken::Wasm(error)) => Err(CallFailure::of_call(&error, "")),
        }
    }

    fn copy_into(&mut self, child: &mut Store<ControllerState>) -> Ended<Parts> {
        // What runs is the code that drops segments; it always returns.
        child.set_epoch_deadline(1);
        if child.get_fuel().is_ok() {
            child.set_fuel(u64::MAX)?;
        }
        let instance = self.program.instance()?.instantiate(&mut *child)?;
        child.data_mut().limiter.instantiating = false;
        let memory = find_memory(child, &instance)?;
        let pages = self.memory.size(&self.store) - memory.size(&*child);
        memory.grow(&mut *child, pages)?;
        pages::copy(
            self.memory.data(&self.store),
            memory.data_mut(&mut *child),
            &self.program.initialised(),
        );
        let parts = Parts {
            instance,
            memory,
            handle: self.handle,
            exports: Exports::find(child, &instance, self.program.abi())?,
        };
        self.copy_references(child, &parts)?;
        if let Some(redrop) = &self.program.layout().redrop {
            call::<(), ()>(child, &instance, redrop, ())?;
        }
        Ok(parts)
    }

    fn copy_references(&mut self, child: &mut Store<ControllerState>, parts: &Parts) -> Ended<()> {
        let program = self.program.clone();
        let layout = program.layout();
        let mut functions = Functions::of(self, &layout.functions);
        for name in &layout.globals {
            let from = self.instance.get_global(&mut self.store, name);
            let to = parts.instance.get_global(&mut *child, name);
            let (Some(from), Some(to)) = (from, to) else {
                return Err(missing(name));
            };
            let value = match from.get(&mut self.store) {
                Val::FuncRef(function) => {
                    Val::FuncRef(functions.translate(self, child, parts, function)?)
                }
                // No host function makes one, so it is null.
                Val::ExternRef(_) => Val::ExternRef(None),
                number => number,
            };
            to.set(&mut *child, value)?;
        }
        for table in layout.tables.iter().filter(|table| table.written) {
            let from = self.instance.get_table(&mut self.store, &table.export);
            let to = parts.instance.get_table(&mut *child, &table.export);
            let (Some(from), Some(to)) = (from, to) else {
                return Err(missing(&table.export));
            };
            self.copy_table(child, parts, &mut functions, (from, to))?;
        }
        Ok(())
    }

    fn copy_table(
        &mut self,
        child: &mut Store<ControllerState>,
        parts: &Parts,
        functions: &mut Functions<'_>,
        (from, to): (Table, Table),
    ) -> Ended<()> {
        let size = from.size(&self.store);
        let more = size - to.size(&*child);
        let null = Ref::null(from.ty(&self.store).element().heap_type());
        to.grow(&mut *child, more, null)?;
        for index in 0..size {
            match from.get(&mut self.store, index) {
                Some(Ref::Func(function)) => {
                    let function = functions.translate(self, child, parts, function)?;
                    to.set(&mut *child, index, Ref::Func(function))?;
                }
                // A table of `externref` has only null elements, and growing has made them.
                _ => break,
            }
        }
        Ok(())
    }
}

/// Translates references to functions of the parent into those of the child. Both instances have the same exports, and
/// the address of a function identifies it within its instance.
struct Functions<'l> {
    names: &'l [String],
    by_address: HashMap<usize, usize>,
    of_child: Vec<Option<Func>>,
}

impl<'l> Functions<'l> {
    fn of(parent: &mut Controller, names: &'l [String]) -> Self {
        let mut by_address = HashMap::with_capacity(names.len());
        for (index, name) in names.iter().enumerate() {
            if let Some(function) = parent.instance.get_func(&mut parent.store, name) {
                by_address.insert(function.to_raw(&mut parent.store).addr(), index);
            }
        }
        Self {
            names,
            by_address,
            of_child: vec![None; names.len()],
        }
    }

    fn translate(
        &mut self,
        parent: &mut Controller,
        child: &mut Store<ControllerState>,
        parts: &Parts,
        function: Option<Func>,
    ) -> Ended<Option<Func>> {
        let Some(function) = function else {
            return Ok(None);
        };
        let address = function.to_raw(&mut parent.store).addr();
        let Some(&index) = self.by_address.get(&address) else {
            return Err(missing("a function"));
        };
        if self.of_child[index].is_none() {
            self.of_child[index] = parts.instance.get_func(&mut *child, &self.names[index]);
        }
        match self.of_child[index] {
            Some(function) => Ok(Some(function)),
            None => Err(missing(&self.names[index])),
        }
    }
}

/// Cannot happen with an instrumented module; a wrong copy would be worse than a failed one.
fn missing(name: &str) -> Broken {
    tracing::error!(name, "an instrumented module lacks an export");
    CallFailure::new(ErrorReason::LIMIT, "the controller cannot be forked").into()
}
