//! [`Kernel`]: the registry of functions and layers, and `run`.
//!
//! ```text
//!   scope ──► parent ──► …        lookup: own functions first; layers: own first, then the parent's
//! ```

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use crate::Result;
use crate::call::{Call, Caller, Inherited};
use crate::error::Error;
use crate::extensions::Extensions;
use crate::function::Fun;
use crate::layer::{Layer, Next};
use crate::limits;
use crate::name::Name;
use crate::spec::Spec;
use crate::state::NeededState;

/// A registry of functions. Cloning shares it; changes are atomic and never affect running calls.
#[derive(Clone, Default)]
pub struct Kernel {
    registry: Arc<Registry>,
    /// What calls through it inherit, if it was made for a call.
    inherited: Option<Arc<Inherited>>,
}

#[derive(Default)]
struct Registry {
    parent: Option<Arc<Self>>,
    /// Whether the parent's functions are found first.
    yields: bool,
    /// Number of functions that panicked, over all scopes (OA-913).
    panics: Arc<AtomicU64>,
    // Locked only for look-ups and changes, never while user code runs.
    tables: RwLock<Tables>,
}

#[derive(Default)]
struct Tables {
    functions: BTreeMap<Name, Registration>,
    /// What functions take as [`crate::State`].
    state: Extensions,
    layers: Vec<(Option<Name>, Arc<dyn Layer>)>,
}

/// A function with its spec, which is shared by all its calls.
#[derive(Clone)]
pub(crate) struct Registration {
    function: Fun,
    pub(crate) spec: Arc<Spec>,
}

impl Kernel {
    /// An empty kernel.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Registers a function under its name.
    ///
    /// # Errors
    /// `Argument` if its spec is not legal; `Exists` if the name is taken; `Limit` above `functions_max`.
    pub fn add(&self, function: Fun) -> Result<()> {
        self.add_all([function])
    }

    /// Registers functions, all of them or none.
    ///
    /// # Errors
    /// As [`Kernel::add`].
    pub fn add_all(&self, functions: impl IntoIterator<Item = Fun>) -> Result<()> {
        let entries: Vec<Registration> = functions.into_iter().map(Registration::new).collect();
        let mut names = std::collections::BTreeSet::new();
        // Checked outside the lock: a check reads the state of the scopes around, each under its own lock.
        for entry in &entries {
            self.check(&entry.spec)?;
            if !names.insert(entry.spec.name.clone()) {
                return Err(taken(&entry.spec));
            }
        }
        self.registry.change(|tables| {
            // All names are checked under the lock that adds them, before the first is added: all or none.
            if let Some(entry) = entries
                .iter()
                .find(|entry| tables.functions.contains_key(&*entry.spec.name))
            {
                return Err(taken(&entry.spec));
            }
            if tables.functions.len() + entries.len() > limits::FUNCTIONS_MAX {
                return Err(Error::Limit {
                    name: "functions_max",
                    max: limits::FUNCTIONS_MAX as u64,
                });
            }
            let named = entries
                .into_iter()
                .map(|entry| (entry.spec.name.clone(), entry));
            tables.functions.extend(named);
            Ok(())
        })
    }

    /// Registers a function in place of the one of that name, which is returned. A function whose spec is not legal is
    /// not registered and is returned itself.
    pub fn replace(&self, function: Fun) -> Option<Fun> {
        let entry = Registration::new(function);
        if let Err(error) = self.check(&entry.spec) {
            tracing::error!(function = %entry.spec.name, %error, "refused to register a function");
            return Some(entry.function);
        }
        let name = entry.spec.name.clone();
        let old = self
            .registry
            .change(|tables| tables.functions.insert(name, entry));
        old.map(|entry| entry.function)
    }

    /// Removes a function. A parent's function of the same name becomes visible again.
    pub fn remove(&self, name: &str) -> Option<Fun> {
        let old = self.registry.change(|tables| tables.functions.remove(name));
        old.map(|entry| entry.function)
    }

    /// The function of this name.
    ///
    /// # Errors
    /// `NotFound`, listing up to 20 that exist.
    pub fn get(&self, name: &str) -> Result<Fun> {
        Ok(self.find(name)?.function)
    }

    /// The specs of all functions, in the order of their names.
    #[must_use]
    pub fn specs(&self) -> Vec<Arc<Spec>> {
        let mut all = BTreeMap::new();
        self.registry.list(&mut all);
        all.into_values().collect()
    }

    /// Sets the value that functions of this kernel and its scopes take as [`State`](crate::State)`<S>`, in place of the
    /// previous one. Calls that have begun keep the value that they have.
    pub fn set_state<S: Clone + Send + Sync + 'static>(&self, state: S) {
        let before = self.registry.change(|tables| {
            let before = tables.state.clone();
            tables.state.insert(state);
            before
        });
        // Dropped after the lock: a state's `Drop` may use this kernel.
        drop(before);
    }

    /// The value of this type that was set here, or else in the kernel that this is a scope of.
    #[must_use]
    pub fn state<S: Clone + Send + Sync + 'static>(&self) -> Option<S> {
        self.registry
            .in_scope(|tables| tables.state.get::<S>().cloned())
    }

    fn check(&self, spec: &Spec) -> Result<()> {
        spec.check()?;
        let has = |needed: &NeededState| {
            self.registry
                .in_scope(|tables| tables.state.contains(needed.id).then_some(()))
                .is_some()
        };
        match spec.state.filter(|needed| !has(needed)) {
            Some(needed) => Err(needed.missing(&spec.name)),
            None => Ok(()),
        }
    }

    /// Adds a layer around every function; inside the layers added before (KE-147).
    pub fn layer(&self, layer: impl Layer) {
        let layer: Arc<dyn Layer> = Arc::new(layer);
        self.registry
            .change(|tables| tables.layers.push((None, layer)));
    }

    /// Adds a layer around every function whose name matches `pattern`: `*` stands for any text, `?` for one character.
    pub fn layer_on(&self, pattern: &str, layer: impl Layer) {
        let entry: (Option<Name>, Arc<dyn Layer>) = (Some(Name::shared(pattern)), Arc::new(layer));
        self.registry.change(|tables| tables.layers.push(entry));
    }

    /// A child kernel: own functions and layers first, then this one's. Dropping it removes only its own.
    #[must_use]
    pub fn scope(&self) -> Self {
        self.child(false)
    }

    /// A child kernel for functions of remote peers: they never hide this one's, also not those that are
    /// added to it later.
    pub(crate) fn annex(&self) -> Self {
        self.child(true)
    }

    fn child(&self, yields: bool) -> Self {
        Self {
            registry: Arc::new(Registry {
                parent: Some(self.registry.clone()),
                yields,
                panics: self.registry.panics.clone(),
                tables: RwLock::default(),
            }),
            inherited: self.inherited.clone(),
        }
    }

    /// Number of functions that have panicked so far, over all scopes; each panic ended its own run only (KE-139).
    #[must_use]
    pub fn panics(&self) -> u64 {
        self.registry.panics.load(Ordering::Relaxed)
    }

    pub(crate) fn panic_count(&self) -> Arc<AtomicU64> {
        self.registry.panics.clone()
    }

    /// Looks a function up.
    pub(crate) fn find(&self, name: &str) -> Result<Registration> {
        self.registry.find(name).ok_or_else(|| {
            let names = self.specs().into_iter().map(|spec| spec.name.clone());
            Error::not_found("function", name, names)
        })
    }

    /// The inside of a call: the layers around this function, then itself.
    pub(crate) fn layered(&self, entry: &Registration) -> Next {
        let layers = self.registry.layers(&entry.spec.name);
        Next::new(layers, entry.function.clone())
    }

    /// What a call through this kernel carries.
    pub(crate) fn caller(&self) -> Caller {
        Caller {
            registry: self.registry.clone(),
            inherited: self.inherited.clone(),
        }
    }

    /// What calls through this handle inherit, if it was made for a call.
    pub(crate) fn inherited(&self) -> Option<&Arc<Inherited>> {
        self.inherited.as_ref()
    }
}

impl Call {
    /// The kernel that the call came from. Calls made through it are nested in this one: they inherit deadline, cancel and
    /// context, and go through its layers (KE-138).
    #[must_use]
    pub fn kernel(&self) -> Kernel {
        let registry = Arc::clone(&self.caller.registry).downcast::<Registry>();
        Kernel {
            // Only [`Kernel::caller`] makes callers, and of a registry.
            registry: registry.unwrap_or_default(),
            inherited: self.caller.inherited.clone(),
        }
    }
}

impl Registration {
    pub(crate) fn new(function: Fun) -> Self {
        // Shared from here on: every call of the function carries it.
        let spec = Arc::new(function.spec().clone());
        Self { function, spec }
    }
}

impl Registry {
    fn look<R>(&self, look: impl FnOnce(&Tables) -> R) -> R {
        // The tables are valid between statements, so a poisoned lock can be used.
        look(&self.tables.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn change<R>(&self, change: impl FnOnce(&mut Tables) -> R) -> R {
        change(&mut self.tables.write().unwrap_or_else(PoisonError::into_inner))
    }

    /// What `look` finds in this scope, or else in the next one around it.
    fn in_scope<R>(&self, look: impl Fn(&Tables) -> Option<R>) -> Option<R> {
        let mut scope = Some(self);
        while let Some(registry) = scope {
            if let Some(found) = registry.look(&look) {
                return Some(found);
            }
            scope = registry.parent.as_deref();
        }
        None
    }

    fn find(&self, name: &str) -> Option<Registration> {
        let own = || self.look(|tables| tables.functions.get(name).cloned());
        let above = || self.parent.as_ref()?.find(name);
        // Looked up each time, so that a function added to the parent later is not hidden either (EV-812).
        if self.yields {
            above().or_else(own)
        } else {
            own().or_else(above)
        }
    }

    /// Adds the entries of this level and of those above; entries found first stay.
    fn list(&self, all: &mut BTreeMap<Name, Arc<Spec>>) {
        let parent = self.parent.as_ref();
        // In the order of look-up: the function that a call would find is the one that is listed.
        if let Some(parent) = parent.filter(|_| self.yields) {
            parent.list(all);
        }
        self.look(|tables| {
            for (name, entry) in &tables.functions {
                all.entry(name.clone())
                    .or_insert_with(|| entry.spec.clone());
            }
        });
        if let Some(parent) = parent.filter(|_| !self.yields) {
            parent.list(all);
        }
    }

    fn layers(&self, name: &str) -> Arc<[Arc<dyn Layer>]> {
        let mut layers = Vec::new();
        let mut level = Some(self);
        while let Some(registry) = level {
            registry.look(|tables| {
                let fits = |pattern: &Option<Name>| {
                    pattern.as_ref().is_none_or(|pattern| glob(pattern, name))
                };
                let found = tables.layers.iter().filter(|(pattern, _)| fits(pattern));
                layers.extend(found.map(|(_, layer)| layer.clone()));
            });
            level = registry.parent.as_deref();
        }
        layers.into()
    }
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<Name> = self.specs().iter().map(|spec| spec.name.clone()).collect();
        f.debug_struct("Kernel")
            .field("functions", &names)
            .finish_non_exhaustive()
    }
}

fn taken(spec: &Spec) -> Error {
    Error::Exists {
        name: spec.name.clone(),
    }
}

/// Whether `name` matches `pattern`. At worst linear in the product of their lengths: remembering the last `*` suffices
/// for backtracking.
fn glob(pattern: &str, name: &str) -> bool {
    let (pattern, name): (Vec<char>, Vec<char>) =
        (pattern.chars().collect(), name.chars().collect());
    let (mut p, mut n) = (0, 0);
    let mut back: Option<(usize, usize)> = None;
    while n < name.len() {
        match pattern.get(p) {
            Some('*') => {
                back = Some((p + 1, n));
                p += 1;
            }
            Some(c) if *c == '?' || *c == name[n] => {
                p += 1;
                n += 1;
            }
            _ => {
                let Some((after_star, taken)) = back else {
                    return false;
                };
                back = Some((after_star, taken + 1));
                p = after_star;
                n = taken + 1;
            }
        }
    }
    pattern[p..].iter().all(|c| *c == '*')
}

#[cfg(test)]
mod tests;
