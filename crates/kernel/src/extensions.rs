//! [`Extensions`]: typed values that travel with a call, as in `http`.

use std::any::{Any, TypeId, type_name};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use serde_json::Value;

use crate::name::Name;

/// Typed values of a call, at most one of each type (KE-138).
///
/// A call has two lists: [`crate::Call::extensions`], which the calls within it inherit, and [`crate::Call::own`].
///
/// Clones share the values until one of them changes; a call without values allocates nothing.
#[derive(Clone, Default)]
pub struct Extensions(Option<Arc<Vec<Entry>>>);

#[derive(Clone)]
struct Entry {
    id: TypeId,
    name: &'static str,
    value: Arc<dyn Any + Send + Sync>,
}

impl Extensions {
    /// The value of this type.
    #[must_use]
    pub fn get<T: Any>(&self) -> Option<&T> {
        // A call has few values, so a list is faster than a map.
        let entries = self.0.as_deref()?;
        let entry = entries.iter().find(|entry| entry.id == TypeId::of::<T>())?;
        entry.value.downcast_ref()
    }

    pub(crate) fn contains(&self, id: TypeId) -> bool {
        let entries = self.0.as_deref().map_or(&[][..], Vec::as_slice);
        entries.iter().any(|entry| entry.id == id)
    }

    /// Sets the value of its type, replacing the previous one.
    pub fn insert<T: Any + Send + Sync>(&mut self, value: T) {
        let entry = Entry {
            id: TypeId::of::<T>(),
            name: type_name::<T>(),
            value: Arc::new(value),
        };
        // Copied only if shared: a change of one call must not be seen by the call around it.
        let entries = Arc::make_mut(self.0.get_or_insert_default());
        match entries.iter_mut().find(|old| old.id == entry.id) {
            Some(old) => *old = entry,
            None => entries.push(entry),
        }
    }

    /// Removes the value of this type, if there is one.
    pub fn remove<T: Any>(&mut self) {
        // Without the look first, a list that others share would be copied to remove nothing.
        if self.get::<T>().is_some()
            && let Some(entries) = &mut self.0
        {
            Arc::make_mut(entries).retain(|entry| entry.id != TypeId::of::<T>());
        }
    }

    /// Whether both are the same list, not merely equal.
    pub(crate) fn is(&self, other: &Self) -> bool {
        match (&self.0, &other.0) {
            (Some(mine), Some(theirs)) => Arc::ptr_eq(mine, theirs),
            (mine, theirs) => mine.is_none() && theirs.is_none(),
        }
    }

    /// Adds named values to the [`Context`].
    pub(crate) fn add_context(&mut self, values: Vec<(Name, Value)>) {
        if values.is_empty() {
            return;
        }
        let mut context = self.get::<Context>().cloned().unwrap_or_default();
        context.0.extend(values);
        self.insert(context);
    }
}

impl fmt::Debug for Extensions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let entries = self.0.as_deref().map_or(&[][..], Vec::as_slice);
        f.debug_set()
            .entries(entries.iter().map(|entry| entry.name))
            .finish()
    }
}

/// Named values that a call passes to the calls made within it; [`crate::Run::context`] adds one, and
/// [`crate::Call::context`] reads one.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Context(BTreeMap<Name, Value>);

impl Context {
    /// The value under `key`.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.0.get(key)
    }

    /// Sets a value.
    pub fn insert(&mut self, key: impl Into<Name>, value: impl Into<Value>) {
        self.0.insert(key.into(), value.into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq)]
    struct Account(u32);

    #[test]
    fn one_value_of_each_type() {
        let mut extensions = Extensions::default();
        assert_eq!(extensions.get::<Account>(), None);
        extensions.insert(Account(1));
        extensions.insert("text");
        extensions.insert(Account(2));
        assert_eq!(extensions.get(), Some(&Account(2)));
        assert_eq!(extensions.get::<&str>(), Some(&"text"));
        extensions.remove::<Account>();
        assert_eq!(extensions.get::<Account>(), None);
        assert_eq!(format!("{extensions:?}"), r#"{"&str"}"#);
    }

    #[test]
    fn a_clone_does_not_see_later_changes() {
        let mut outer = Extensions::default();
        assert!(outer.is(&Extensions::default()));
        outer.insert(Account(1));
        let mut inner = outer.clone();
        assert!(inner.is(&outer));
        inner.remove::<u8>();
        assert!(inner.is(&outer), "nothing to remove, so nothing was copied");
        inner.insert(Account(2));
        assert_eq!(outer.get(), Some(&Account(1)));
        assert!(!inner.is(&outer));
    }

    #[test]
    fn ke_138_named_values_are_added_to_those_of_the_caller() {
        let mut extensions = Extensions::default();
        extensions.add_context(vec![(Name::shared("a"), 1.into())]);
        extensions.add_context(vec![(Name::shared("b"), 2.into())]);
        let context = extensions.get::<Context>().unwrap();
        assert_eq!(context.get("a"), Some(&Value::from(1)));
        assert_eq!(context.get("b"), Some(&Value::from(2)));
        assert_eq!(context.get("c"), None);
    }
}
